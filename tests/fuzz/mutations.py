"""Hypothesis strategies for hostile bytes: valid ones damaged, and JSON that is almost a record."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

HUGE = (0, 1, -1, 2**53, 2**62, 2**62 + 1, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e308, -1e308, 5e-324)
TEXTS = (
    "", "a", "é", "\ud800", "\0", "\n", "../../etc/passwd", "islands/b/../a/x", "/x", "x/",
    "0" * 32, "f" * 32, "F" * 32, "\x1b[2J",
    "islands/a/payloads/0000/0000000001-0-" + "0" * 32 + ".safetensors.zst", "x" * 5000,
)  # fmt: skip

leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(HUGE), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(TEXTS), st.text(max_size=20),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(TEXTS[:6]), inner, max_size=4),
    max_leaves=12,
)
raw_numbers = st.sampled_from(["1e400", "-0", "1.0", "01", "NaN", "-Infinity", "9" * 5000, "1e-400", '"\\ud800"', "{}"])


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes after a few changes: bits, cuts, insertions, pieces moved or repeated, something appended."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 40))
        how = draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat", "move", "append", "truncate"]))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del data[at : at + length]
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
        elif how == "repeat":
            data[at:at] = data[at : at + length]
        elif how == "move":
            piece = data[at : at + length]
            del data[at : at + length]
            to = draw(st.integers(0, len(data)))
            data[to:to] = piece
        elif how == "append":
            data += draw(st.one_of(st.just(valid), st.binary(min_size=1, max_size=20)))
        else:
            del data[at:]
    return bytes(data)


@st.composite
def almost(draw: st.DrawFn, record: msgspec.Struct | dict[str, Any]) -> bytes:
    """The JSON of a record after one change to its tree, and perhaps one to its text."""
    tree = json.loads(msgspec.json.encode(record))
    places = list(_places(tree))
    holder, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(["replace", "remove", "add", "nest", "double", "number"]))
    marker = "@here@"
    if how == "remove":
        del holder[key]
    elif how == "add":
        fresh = draw(st.sampled_from(TEXTS[:6]))
        if isinstance(holder, dict):
            holder[fresh] = draw(trees)
        else:
            holder.append(draw(trees))
    elif how == "replace":
        holder[key] = draw(trees)
    else:
        old, holder[key] = holder[key], marker
    text = json.dumps(tree, ensure_ascii=draw(st.booleans()), separators=(",", ":"))
    if how == "nest":
        depth = draw(st.sampled_from([1, 100, 3000]))
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
        text = text.replace(f'"{marker}"', opening * depth + "1" + closing * depth)
    elif how == "number":
        text = text.replace(f'"{marker}"', draw(raw_numbers))
    elif how == "double":  # The same key twice, or a list's entry twice.
        value = json.dumps(old)
        name = f"{json.dumps(key)}:" if isinstance(holder, dict) else ""
        text = text.replace(f'"{marker}"', f"{value},{name}{value}")
    return text.encode(errors="surrogatepass")


def _places(tree: Any) -> Any:
    """Every (container, key) of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)
