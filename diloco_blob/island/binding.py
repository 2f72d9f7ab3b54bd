"""`Island`: the thin binding to torch models and optimizers. The only module of the library that imports torch.

with Island("s3://bucket/run", model=model, optimizer=optimizer, name="us-east-1a") as island:
    for batch in batches:
        loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
        island.step(tokens=batch.numel(), loss=loss)
"""

import math
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch

from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import Corrupt, DilocoError, InvalidSettings
from diloco_blob.core.ids import SystemIds, check_island_name
from diloco_blob.core.settings import Settings, load_settings
from diloco_blob.island.arrays import Arrays
from diloco_blob.island.core import IslandCore, start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.island.pumps import ThreadedDriver
from diloco_blob.store import open_store


class Island:
    """A context manager around your training loop that makes it one island of a run.

    Entering joins the run: the first island creates it from the model's weights, every other one adopts the
    run's. Leaving without an error calls `finish`. While you are inside, call `step` after each optimizer step
    and nothing else. SIGTERM ends the loop as Ctrl-C does, unless you handle it: nobody waits for an island that was
    stopped.

    Args:
        run: URL of the run; `$DILOCO_RUN` by default.
        model: Its trainable parameters are exchanged. All must be floating point.
        optimizer: The inner optimizer, or several. Its state stays here and is kept in the local checkpoint.
        name: The island's name, its own in the run; `$DILOCO_ISLAND` by default.
        settings: Settings, a .toml file or a preset's name, for creating the run or to be compared with the run's;
            `$DILOCO_SETTINGS` by default, else the run's own, else the defaults.
        model_config: Free-form JSON configuration of the model that `export` writes beside the weights.
        checkpoint_dir: Folder on this machine for the local checkpoint; `$DILOCO_CHECKPOINT_DIR` by default, else none.

    Raises:
        InvalidSettings: Something in these words is wrong, or does not fit the run.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        name: str | None = None,
        settings: Settings | str | Path | None = None,
        model_config: Mapping[str, Any] | None = None,
        checkpoint_dir: str | Path | None = None,
    ) -> None:
        self.run = run or os.environ.get("DILOCO_RUN", "")
        if not self.run:
            raise InvalidSettings("no run given", "give the run's URL, or set DILOCO_RUN")
        self.name = name or os.environ.get("DILOCO_ISLAND", "")
        if not self.name:
            raise InvalidSettings("no island name given", "give each island a name of its own, or set DILOCO_ISLAND")
        check_island_name(self.name)
        given = settings if settings is not None else os.environ.get("DILOCO_SETTINGS") or None
        folder = checkpoint_dir or os.environ.get("DILOCO_CHECKPOINT_DIR") or None
        self._options = IslandOptions(
            name=self.name,
            settings=given if isinstance(given, Settings) or given is None else load_settings(given),
            islands=_expected_islands(),
            model_config=_plain(model_config or {}),
            checkpoint_dir=Path(folder) if folder else None,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._port = TorchPort(model, optimizers)
        self._core: IslandCore | None = None
        self._sigterm_caught = False

    def __enter__(self) -> Self:
        clock = SystemClock()
        ids = SystemIds()
        store = open_store(self.run, clock=clock, ids=ids)
        try:
            core = start(store, self._port, self._options, clock=clock, ids=ids, driver=ThreadedDriver())
        except BaseException:
            store.close()
            raise
        self._core = core
        self._catch_sigterm()
        try:
            core.block(core.begin())
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.finish()
            except BaseException as failure:
                self._leave(failure)
                raise
        self._leave(error)

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None, cursor: str = "") -> None:
        """Call after each optimizer step: counts it, sends progress when due, takes new versions when they are there.

        Args:
            tokens: Tokens in the step's batch; the weight of this island's progress.
            loss: The step's training loss, for `status`. A tensor is only read when the status is.
            cursor: Where your data stream is now; `cursor` says it again after a restart.

        Raises:
            Fenced: The island was started again by another process.
            Denied: The store refuses to be written to.
        """
        core = self._joined()
        shown = loss.detach() if isinstance(loss, torch.Tensor) else loss
        core.block(core.after_step(tokens, loss=shown, cursor=cursor))

    def finish(self) -> None:
        """Send what is left, wait until it is merged, and put the newest global weights into the model.

        Called by leaving the `with` block without an error; call it yourself to evaluate the result inside.
        """
        core = self._joined()
        core.block(core.finish())

    def record_eval(self, *, loss: float, bits_per_byte: float | None = None, sample: str = "") -> None:
        """Report a held-out evaluation, for `status` and the summary of `launch`.

        Args:
            loss: Mean loss in nats per token.
            bits_per_byte: What people compare; the loss in bits, which is right for byte-level models, if not given.
            sample: Some generated text.
        """
        bits = loss / math.log(2) if bits_per_byte is None else bits_per_byte
        self._joined().record_eval(loss, bits, sample)

    @property
    def steps(self) -> int:
        """Inner steps of this island over all its starts."""
        return self._joined().steps

    @property
    def tokens(self) -> int:
        """Tokens of this island over all its starts; drives learning-rate schedules."""
        return self._joined().tokens

    @property
    def cursor(self) -> str:
        """The cursor of the last step that counted; empty at first."""
        return self._joined().cursor

    @property
    def version(self) -> int:
        """The global version that the model has last taken, the lowest over the fragments."""
        return self._joined().version

    @property
    def resumed(self) -> bool:
        """Whether this start goes on with what an earlier one began."""
        return self._joined().joined.resumed

    @property
    def settings(self) -> Settings:
        """The run's settings."""
        return self._joined().run.run.settings

    def _joined(self) -> IslandCore:
        if self._core is None:
            raise InvalidSettings("this island has not joined its run", "use it as: with Island(...) as island:")
        return self._core

    def _catch_sigterm(self) -> None:
        """Make SIGTERM end the loop as Ctrl-C does, so that the island leaves properly; unless you handle it."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            self._sigterm_caught = True

    def _leave(self, error: BaseException | None) -> None:
        if self._sigterm_caught:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._sigterm_caught = False
        core = self._joined()
        if error is None:
            state, message = "done", ""
        elif isinstance(error, DilocoError):
            state, message = ("fenced" if error.kind == "fenced" else "failed"), str(error)
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            state, message = "stopped", ""
        else:
            state, message = "failed", f"{type(error).__name__}: {error}"
        try:
            core.end(state, message)
        finally:
            core.store.close()


class TorchPort:
    """A torch model and its optimizers as arrays: see `ModelPort`."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # named_parameters gives a tied parameter once, under its first name.
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizers = optimizers
        self.exact = all(p.dtype in (torch.float32, torch.float64) for p in self._parameters.values())
        for name, parameter in self._parameters.items():
            if not parameter.dtype.is_floating_point:
                raise InvalidSettings(f"parameter {name} is {parameter.dtype}, not floating point")

    def tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """See `ModelPort.tensors`."""
        return [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in self._parameters.items()]

    def read(self, names: Sequence[str]) -> Arrays:
        """See `ModelPort.read`."""
        with torch.no_grad():
            return {name: _host_copy(self._parameters[name]) for name in names}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `ModelPort.write`."""
        with torch.no_grad():
            for name, array in arrays.items():
                self._parameters[name].copy_(torch.from_numpy(array))

    def capture(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """See `ModelPort.capture`: optimizer state, and the random state of the CPU and, if used, of each GPU."""
        arrays: dict[str, np.ndarray] = {"rng/cpu": torch.get_rng_state().numpy()}
        if torch.cuda.is_available():
            for device, state in enumerate(torch.cuda.get_rng_state_all()):
                arrays[f"rng/cuda{device}"] = state.numpy()
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        saved: list[dict[str, Any]] = []
        for number, optimizer in enumerate(self._optimizers):
            values: dict[str, dict[str, Any]] = {}
            for index, entries in optimizer.state_dict()["state"].items():
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        tensor, mark = value.detach().to("cpu", copy=True).contiguous(), ""
                        if tensor.dtype == torch.bfloat16:  # numpy has no such type
                            tensor, mark = tensor.view(torch.int16), ":bfloat16"
                        arrays[f"optimizer/{number}/{index}/{key}{mark}"] = tensor.numpy()
                    else:
                        values.setdefault(str(index), {})[key] = value
            saved.append(values)
        try:
            msgspec.json.encode(saved)
        except TypeError as error:
            raise InvalidSettings(
                f"{', '.join(kinds)} keeps state that a local checkpoint cannot hold: {error}",
                "use another optimizer, or no checkpoint folder",
            ) from error
        return arrays, {"kinds": kinds, "optimizers": saved}

    def restore(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, object]) -> None:
        """See `ModelPort.restore`. Learning rates and other group settings stay those of the program."""
        saved: Any = state.get("optimizers", [])
        kinds = [type(optimizer).__name__ for optimizer in self._optimizers]
        if state.get("kinds") != kinds:
            raise Corrupt(f"the checkpoint is of {state.get('kinds')}, the program uses {kinds}")
        for number, optimizer in enumerate(self._optimizers):
            entries: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in saved[number].items()}
            for name, array in arrays.items():
                if name.startswith(f"optimizer/{number}/"):
                    _, _, index, key = name.split("/", 3)
                    tensor = torch.from_numpy(np.array(array))
                    if key.endswith(":bfloat16"):
                        key, tensor = key.removesuffix(":bfloat16"), tensor.view(torch.bfloat16)
                    entries.setdefault(int(index), {})[key] = tensor
            groups = optimizer.state_dict()["param_groups"]
            try:
                optimizer.load_state_dict({"state": entries, "param_groups": groups})
            except (ValueError, KeyError, RuntimeError) as error:
                raise Corrupt(f"the checkpoint's optimizer state does not fit: {error}") from error
        if "rng/cpu" in arrays:
            torch.set_rng_state(torch.from_numpy(np.array(arrays["rng/cpu"])))
        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                if f"rng/cuda{device}" in arrays:
                    torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays[f"rng/cuda{device}"])), device)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration, if JSON can hold it."""
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(config)), type=dict[str, Any])
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidSettings(
            f"model_config cannot be kept as JSON: {error}", "use text, numbers, lists, dicts"
        ) from error
    return plain


def _host_copy(parameter: torch.Tensor) -> np.ndarray:
    """fp32 in memory that numpy allocates: it asks for huge pages; other fresh memory costs more than a copy."""
    values = np.empty(tuple(parameter.shape), np.float32)
    torch.from_numpy(values).copy_(parameter)
    return values


def _expected_islands() -> int:
    text = os.environ.get("DILOCO_ISLANDS", "0")
    if not text.isdecimal():
        raise InvalidSettings(f"DILOCO_ISLANDS is {text!r}", "give the number of islands, or leave it unset")
    return int(text)
