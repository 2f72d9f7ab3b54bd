"""Settings that would break a run are refused where they are read, in one line that names the setting."""

import math

import msgspec
import pytest

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.settings import Merge, Outer, Policy, Settings, parse_settings

FLOATS = [
    f"{section}.{field.name}"
    for section in Settings.__struct_fields__
    for field in msgspec.structs.fields(type(getattr(Settings(), section)))
    if isinstance(getattr(getattr(Settings(), section), field.name), float)
]


def test_there_are_floats() -> None:
    assert {"policy.deadline_s", "outer.lr", "merge.staleness_a", "up.decay"} <= set(FLOATS)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_json_cannot_hold_is_refused(name: str, value: str) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(InvalidSettings) as refused:
        parse_settings(f"[{section}]\n{key} = {value}", source="run.toml")
    assert name in refused.value.message.replace("$.", "")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": Policy(deadline_s=math.inf)},
        {"outer": Outer(lr=math.inf)},
        {"merge": Merge(staleness_b=math.nan)},
    ],
)
def test_so_it_is_in_python(settings: dict[str, msgspec.Struct]) -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        Settings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [Policy(quorum=5), Policy(min_contributions=5)])
def test_more_islands_than_there_are(policy: Policy) -> None:
    settings = Settings(policy=policy)
    assert settings.resolved().policy == msgspec.structs.replace(policy, quorum=policy.quorum or 1)
    assert settings.resolved(5).policy.islands == 5
    with pytest.raises(InvalidSettings, match=r"with 2 islands, policy.* \(5\) cannot exceed policy\.islands \(2\)"):
        settings.resolved(2)
    # Others may be elsewhere: who says so is believed.
    told = msgspec.structs.replace(settings, policy=msgspec.structs.replace(policy, islands=6))
    assert told.resolved(2).policy.islands == 6


def test_more_contributions_than_islands_in_a_file() -> None:
    with pytest.raises(InvalidSettings, match=r"policy\.min_contributions \(3\) cannot exceed policy\.islands"):
        parse_settings("[policy]\nislands = 2\nmin_contributions = 3", source="run.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sync]\nsync_evry = 1", "unknown setting sync.sync_evry (did you mean sync.sync_every?)"),
        ("sync_every = 1", "unknown setting sync_every (did you mean sync.sync_every?)"),
        ("[sync]\nmomentum = 0.5", "unknown setting sync.momentum (did you mean outer.momentum?)"),
        ("[snyc]\nsync_every = 1", "unknown setting snyc (did you mean sync?)"),
        ("[sync]\nxyzzy_plugh = 1", "unknown setting sync.xyzzy_plugh"),
        ("[sync]\nsync_every = 0", "sync.sync_every: Expected `int` >= 1"),
        ("sync = 1", "sync: Expected `object`, got `int`"),
    ],
)
def test_a_mistake_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        parse_settings(text, source="run.toml")
    assert refused.value.message == f"run.toml: {said}"
