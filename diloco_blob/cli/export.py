"""`diloco-blob export`: a run's weights as `model.safetensors` in the Hugging Face layout.

One tensor at a time goes from the bucket into the file, checked against the digests in the run's commits before the
file gets its name. Frozen parameters and buffers are not exchanged, so they are in no bucket and not in the file. Files
that are not an earlier export of the same run are not overwritten.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from diloco_blob.aggregate.payloads import read_chunks
from diloco_blob.cli.urls import absolute_url
from diloco_blob.core.errors import Corrupt, Denied, DilocoError, InvalidSettings, NotFound
from diloco_blob.core.ids import SystemIds
from diloco_blob.core.settings import Codec
from diloco_blob.protocol.collecting import horizon
from diloco_blob.protocol.heads import Head, RunInfo, find_head, newest_version, read_head, read_run
from diloco_blob.protocol.layout import fragment_layout, fragment_tensors
from diloco_blob.protocol.records import TensorSpec
from diloco_blob.store import ObjectStore, open_store
from diloco_blob.wire import FloatArray, WeightsDigest, codec_for, read_tensor_stream

MODEL, CONFIG, ABOUT = "model.safetensors", "config.json", "diloco.json"

_EPILOG = """\
examples:
  diloco-blob export s3://bucket/run model/
  diloco-blob export demo/run model/ --at 12       if it is still kept (collect.keep_versions)

Writes model.safetensors (every trained parameter in the type that it has in the model), config.json (the model's
configuration as the script gave it) and diloco.json (which run, which version). What islands do not exchange is not in
the file: frozen parameters (requires_grad=False), buffers, and the further names of tied parameters. Load it with
strict=False into a model that has these. Needs nothing but the right to read the bucket.
"""

_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float32": ("F32", np.dtype("<f4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
    "float64": ("F64", np.dtype("<f8")),
}
"""Types in the model, by what safetensors calls them, and the arrays that hold them; numpy has no bfloat16."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder to write to; created if need be")
    parser.add_argument("--at", metavar="VERSION", type=int, help="this version of every fragment, not the newest")
    parser.add_argument("--force", action="store_true", help="overwrite files that are not an export of this run")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        DilocoError: No such run or version, foreign files in the folder, or weights that are damaged.
    """
    path = export(open_store(args.url), args.directory, at=args.at, force=args.force)
    print(path)
    return 0


def export(store: ObjectStore, directory: Path, *, at: int | None = None, force: bool = False) -> Path:
    """Write a version of the model.

    Args:
        store: The run's store.
        directory: Where to; created if need be.
        at: Which version of every fragment; the newest of each by default.
        force: Overwrite files that are not an earlier export of this run.

    Returns:
        The path of `model.safetensors`.

    Raises:
        NotFound: There is no run at this URL.
        InvalidSettings: No such version, or it was collected; or files in the way.
        Corrupt: The weights are not what the commits say.
        Denied: The folder cannot be written to.
    """
    info = read_run(store)
    if not force:
        check_directory(directory, store.url)
    heads = _heads(store, info, at)
    while not _exported(store, info, heads, directory):
        newer = _heads(store, info, at)
        if newer == heads:
            raise _missing(store, info, at)
        heads = newer  # Of a run that goes on the newest versions may be collected while they are read.
    return directory / MODEL


def _exported(store: ObjectStore, info: RunInfo, heads: list[Head], directory: Path) -> bool:
    """Write the files; False if weights are missing."""
    about = {
        "run": store.url,
        "versions": {str(head.fragment): head.version for head in heads},
        "weights": {str(head.fragment): head.weights.digest for head in heads},
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / MODEL, _model(store, info, heads))
        _write(directory / CONFIG, iter([_pretty(info.run.model)]))
        _write(directory / ABOUT, iter([_pretty(about)]))
    except OSError as error:
        raise Denied(f"cannot write to {directory}: {error.strerror or error}") from error
    except NotFound:
        return False
    return True


def check_directory(directory: Path, run: str, *, hint: str = "choose another folder, or --force to overwrite") -> None:
    """Raise unless a folder may be written to: none of our names is there, or all are an export of the same run.

    Args:
        directory: The folder; need not be there.
        run: URL of the run.
        hint: What whoever asked can do if it may not.

    Raises:
        InvalidSettings: Something is in the way.
    """
    if directory.exists() and not directory.is_dir():
        raise InvalidSettings(f"{directory} is not a folder", "choose another one")
    present = [name for name in (MODEL, CONFIG, ABOUT) if (directory / name).exists()]
    if not present:
        return
    try:
        about = json.loads((directory / ABOUT).read_text())
        found = about["run"]
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidSettings(f"{directory / present[0]} is there and not ours", hint) from None
    if absolute_url(str(found)) != absolute_url(run):
        raise InvalidSettings(f"{directory} holds the model of another run, {found}", hint)


def _heads(store: ObjectStore, info: RunInfo, at: int | None) -> list[Head]:
    return [_head(store, info, p, at) for p in range(len(info.run.fragments))]


def _missing(store: ObjectStore, info: RunInfo, at: int | None) -> DilocoError:
    """Why weights that a commit names are not there, and what can be had instead."""
    newest = [newest_version(store, p) for p in range(len(info.run.fragments))]
    oldest = max(horizon(version, info.run.settings.collect.keep_versions) for version in newest)
    if at is None or at >= oldest:
        return Corrupt("weights that the run should keep are missing", "diloco-blob verify says which")
    if oldest > min(newest):
        hint = "no version is kept of every fragment; without --at the newest of each is exported"
    else:
        hint = f"--at can be {oldest} to {min(newest)}"
    return InvalidSettings(f"version {at} was collected", hint)


def _head(store: ObjectStore, info: RunInfo, fragment: int, at: int | None) -> Head:
    if at is None:
        return find_head(store, info, fragment)
    try:
        if at < 0:
            raise NotFound("versions start at 0")
        return read_head(store, info, fragment, at)
    except NotFound:
        newest = find_head(store, info, fragment).version
        raise InvalidSettings(
            f"fragment {fragment} has no version {at}",
            f"its newest is {newest}; --at needs one that all fragments have",
        ) from None


def _model(store: ObjectStore, info: RunInfo, heads: list[Head]) -> Iterator[bytes]:
    """The file's bytes, a piece per tensor: header, then the tensors fragment by fragment."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for head in heads:
        for spec in fragment_tensors(info.run.tensors, head.fragment):
            name, dtype = _dtype(spec)
            end = position + dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
            table[spec.name] = {"dtype": name, "shape": list(spec.shape), "data_offsets": [position, end]}
            position = end
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for head in heads:
        yield from _fragment(store, info, head)


def _fragment(store: ObjectStore, info: RunInfo, head: Head) -> Iterator[bytes]:
    specs = fragment_tensors(info.run.tensors, head.fragment)
    layout = fragment_layout(info.run.tensors, head.fragment)
    ref = head.weights.params
    state = WeightsDigest()
    tensors = read_tensor_stream(read_chunks(store, ref), layout, ref.size)
    for spec, (name, values) in zip(specs, tensors, strict=True):
        state.update(name, values)
        yield _converted(spec, values).tobytes()
    if state.hexdigest() != head.weights.digest:
        raise Corrupt(f"{ref.key}: its weights are not those of version {head.version}", "diloco-blob verify says more")


def _dtype(spec: TensorSpec) -> tuple[str, np.dtype[Any]]:
    name = spec.dtype.removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidSettings(f"tensor {spec.name} is {spec.dtype}, which cannot be exported")
    return _DTYPES[name]


def _converted(spec: TensorSpec, values: FloatArray) -> np.ndarray[Any, Any]:
    name, dtype = _dtype(spec)
    if name == "BF16":
        (bits,) = codec_for(Codec(name="bf16"), 1).encode(values).values()
        return bits
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if not np.isfinite(converted).all():
        raise Corrupt(f"tensor {spec.name} has values that {spec.dtype} cannot hold")
    return converted


def _write(path: Path, pieces: Iterator[bytes]) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{SystemIds().fresh()[:8]}")
    try:
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
