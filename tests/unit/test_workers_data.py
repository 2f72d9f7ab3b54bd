"""The reference program's text: what is held out, and that its place decides what a batch is."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))
import data

MB = 1_000_000


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return str(folder)


def as_bytes(text: torch.Tensor) -> bytes:
    return text.numpy().tobytes()


def many_files(num: int = 200) -> dict[str, bytes]:
    return {f"part{i % 7}/{i}.txt": f"<{i}>".encode() * 100 for i in range(num)}


def test_default_text_is_there_and_split_about_one_to_twenty():
    train, held_out = data.load([], 20 * MB)
    assert len(train) > 5 * MB
    assert 0.01 < len(held_out) / len(train) < 0.15
    assert b"def __init__(self" in as_bytes(train)


def test_default_text_is_the_same_every_time():
    first, second = data.load([], 20 * MB), data.load([], 20 * MB)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_held_out_file_is_trained_on(tmp_path):
    files = many_files()
    train, held_out = map(as_bytes, data.load([write(tmp_path, files)], MB))
    sides = [(text in train, text in held_out) for text in files.values()]
    assert set(sides) == {(True, False), (False, True)}
    assert 2 <= sum(held for _, held in sides) <= 30


def test_side_of_a_file_does_not_depend_on_the_others_nor_on_where_the_folder_lies(tmp_path):
    files = many_files(600)
    _, all_held = data.load([write(tmp_path / "a", files)], MB)
    half = dict(list(files.items())[:300])
    train, held = data.load([write(tmp_path / "b" / "c", half)], MB)
    for text in half.values():
        assert (text in as_bytes(all_held)) == (text in as_bytes(held)) != (text in as_bytes(train))


def test_copy_of_a_file_is_not_on_both_sides(tmp_path):
    files = {f"copy{i}": b"the same text in each of many files" for i in range(100)} | many_files()
    train, held_out = map(as_bytes, data.load([write(tmp_path, files)], MB))
    assert (train + held_out).count(b"the same text") == 1


def test_single_file_loses_its_end_to_the_held_out_side(tmp_path):
    text = bytes(range(1, 101)) * 10
    (tmp_path / "book").write_bytes(text)
    train, held_out = map(as_bytes, data.load([str(tmp_path / "book")], MB))
    assert train + held_out == text
    assert len(held_out) == 50


def test_files_and_folders_mix_and_what_is_no_text_is_left_out(tmp_path):
    write(tmp_path / "folder", {"a": b"aaaa", ".hidden": b"hhhh", ".git/x": b"gggg", "image": b"\x89P\0NG"})
    (tmp_path / "b").write_bytes(b"bbbb")
    train, held_out = map(as_bytes, data.load([str(tmp_path / "b"), str(tmp_path / "folder")], MB))
    assert train + held_out == b"bbbb\naaaa"


def test_text_is_capped(tmp_path):
    train, held_out = data.load([write(tmp_path, many_files())], 5000)
    assert 5000 <= len(train) + len(held_out) < 5100  # and a line feed between files


def test_missing_path_says_which(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.load([str(tmp_path / "nowhere")], MB)


@pytest.mark.parametrize("files", [{}, {"empty": b""}, {"image": b"\0\1\2"}])
def test_no_text_at_all_says_so(tmp_path, files):
    tmp_path.joinpath("folder").mkdir()
    with pytest.raises(ValueError, match=r"no text in .*folder"):
        data.load([write(tmp_path / "folder", files)], MB)


def test_batch_is_a_function_of_stream_and_place_alone():
    text = torch.arange(256, dtype=torch.uint8).repeat(100)
    first = data.train_batch(text, "0/a", 5, batch=4, context=16)
    torch.rand(3)  # the global generator has no part in it
    data.train_batch(text, "0/b", 9, batch=4, context=16)
    assert torch.equal(first, data.train_batch(text, "0/a", 5, batch=4, context=16))
    assert first.shape == (4, 17)
    assert first.dtype == torch.long
    assert torch.equal((first[:, 1:] - first[:, :-1]) % 256, torch.ones(4, 16, dtype=torch.long))
    others = [("0/a", 6), ("0/b", 5), ("1/a", 5)]
    assert not any(torch.equal(first, data.train_batch(text, *other, batch=4, context=16)) for other in others)


def test_batches_reach_both_ends_of_the_text():
    text = torch.arange(20, dtype=torch.uint8)
    seen = data.train_batch(text, "s", 0, batch=500, context=16)
    assert (int(seen.min()), int(seen.max())) == (0, 19)


def test_held_out_batches_are_fixed_and_cover_the_text():
    text = torch.arange(200, dtype=torch.uint8)
    first = list(data.held_out_batches(text, 3, batch=4, context=9))
    assert [part.shape for part in first] == [(4, 10)] * 3
    assert (int(first[0][0, 0]), int(first[-1][-1, -1])) == (0, 199)
    again = data.held_out_batches(text, 3, batch=4, context=9)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
