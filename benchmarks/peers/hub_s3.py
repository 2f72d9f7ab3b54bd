"""The hub's object store: SeaweedFS on the hub's loopback, and the counting proxy that workers talk to.

    python hub_s3.py ADDRESS FOLDER

Writes FOLDER/s3.json, what a client needs in its environment, once an empty bucket `lab` is there; and, when it gets
SIGTERM, FOLDER/requests.json, the requests by client. The server is the one of the tests.
"""

import json
import signal
import sys
import threading
from pathlib import Path

from counting_proxy import CountingProxy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import servers

PORT = 8333


def main() -> None:
    """Serve until SIGTERM."""
    address, folder = sys.argv[1], Path(sys.argv[2])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with servers.seaweedfs() as server, CountingProxy((address, PORT), server.port) as proxy:
        endpoint = f"http://{address}:{PORT}"
        env = {**servers.s3_env(endpoint), "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        partial = folder / "s3.json.part"
        partial.write_text(json.dumps(env))
        partial.rename(folder / "s3.json")
        ended.wait()
        (folder / "requests.json").write_text(json.dumps(proxy.counts()))


if __name__ == "__main__":
    main()
