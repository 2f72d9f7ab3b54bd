"""What a training loop says of a step is refused where it is said, in one line that names the setting."""

import pytest

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.settings import Policy, Settings
from diloco_blob.island.checks import checked_tokens
from diloco_blob.testing.fleet import TOKENS, Fleet


@pytest.mark.parametrize("tokens", [1, 1000])
def test_what_the_run_allows_passes(tokens: int) -> None:
    assert checked_tokens(tokens, 1000) == tokens


@pytest.mark.parametrize("tokens", [0, -1, 1001, 1.5, "7", None])
def test_anything_else_is_refused_with_the_setting_named(tokens: object) -> None:
    with pytest.raises(InvalidSettings) as caught:
        checked_tokens(tokens, 1000)  # type: ignore[arg-type]
    assert caught.value.message == f"an inner step of {tokens!r} tokens"
    assert caught.value.hint == "give step() a whole number from 1 to 1000 (policy.tokens_per_step_max of this run)"


def test_an_island_is_held_to_the_limit_of_its_run() -> None:
    fleet = Fleet(Settings(policy=Policy(islands=1, tokens_per_step_max=TOKENS - 1)), num_islands=1)
    fleet.add_all()
    with pytest.raises(InvalidSettings, match=f"an inner step of {TOKENS} tokens"):
        fleet.run(steps=1)
