"""SeaweedFS inside the hub's namespace, with one empty bucket, until standard input ends.

    ip netns exec HUB python storage.py FOLDER

Started by `network.storage`. Prints, as a line of JSON, the environment of a client once the bucket is there. The ports
are fixed: nobody else is in the namespace.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from network import HUB_ADDRESS

_KEY, _SECRET = "labkey", "labsecret123"  # of a server that only these namespaces can reach
_PORT = 8333
_READY_S = 60.0


def command(folder: Path) -> list[str]:
    """SeaweedFS, all in one process."""
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    key = {"accessKey": _KEY, "secretKey": _SECRET}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [{"name": "lab", "credentials": [key], "actions": actions}]}))
    (folder / "data").mkdir()
    return [
        *(str(Path(sys.executable).parent / "weed"), "-logtostderr", "mini", f"-dir={folder}/data"),
        *(f"-ip={HUB_ADDRESS}", "-ip.bind=0.0.0.0", "-master.telemetry=false", "-admin.ui=false", "-webdav=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.port={_PORT}", f"-s3.config={config}"),
    ]


def environment() -> dict[str, str]:
    """What a client needs; nothing of the user's own configuration gets in."""
    return {
        "AWS_ENDPOINT_URL_S3": f"http://{HUB_ADDRESS}:{_PORT}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def wait_for_bucket(process: subprocess.Popen[bytes]) -> None:
    """Create the bucket as soon as the server answers.

    Raises:
        RuntimeError: It ended, or does not answer.
    """
    os.environ.update(environment())
    client = boto3.client("s3")
    deadline = monotonic() + _READY_S
    while True:
        try:
            client.create_bucket(Bucket="lab")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or monotonic() > deadline:
                raise RuntimeError("SeaweedFS did not come up") from error
            sleep(0.1)


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    env = {**os.environ, "HOME": str(folder)}
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, cwd=folder, env=env)
    try:
        wait_for_bucket(process)
        print(json.dumps(environment()), flush=True)
        sys.stdin.read()
    finally:
        process.kill()  # nothing in its folder is needed any more
        process.wait()


if __name__ == "__main__":
    main()
