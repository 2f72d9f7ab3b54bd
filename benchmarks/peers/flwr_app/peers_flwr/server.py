"""The server's half: Flower's own FedAvgM, with the outer learning rate and momentum of the others.

Its momentum is plain, not Nesterov's: there is no choice.
"""

import json
import sys
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvgM  # type: ignore[import-not-found]

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator] # has no types
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and leave the global weights in `global.npz`."""
    sys.path.insert(0, str(context.run_config["bench"]))
    from task import Recipe

    folder = Path(str(context.run_config["folder"]))
    recipe = Recipe(**json.loads((folder / "recipe.json").read_text()))
    strategy = FedAvgM(
        fraction_evaluate=0.0, server_learning_rate=recipe.outer_lr, server_momentum=recipe.outer_momentum
    )
    initial = ArrayRecord(recipe.model().state_dict())
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=recipe.rounds)
    arrays = {name: tensor.numpy() for name, tensor in result.arrays.to_torch_state_dict().items()}
    with (folder / "global.part").open("wb") as file:
        np.savez(file, **arrays)
    (folder / "global.part").rename(folder / "global.npz")
