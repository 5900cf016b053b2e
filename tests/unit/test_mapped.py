"""Pages of a mapped file are given back behind what was read; of other memory nothing is."""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.model.mapped import PASS_VALUES, MappedFile, passes
from anabranch.core.model.params import ParamSpec, TensorSpec, add_scaled
from anabranch.core.model.updates import find_flaw

HEAD_BYTES = 24  # what may stand before the values: they begin within a page
KB = re.compile(r"^Rss:\s+(\d+) kB", re.MULTILINE)

needs_smaps = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is mapped")


def mapped(path: Path, values: np.ndarray) -> np.ndarray:
    path.write_bytes(bytes(HEAD_BYTES) + values.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file = MappedFile(descriptor)
    finally:
        os.close(descriptor)
    return np.frombuffer(memoryview(file), values.dtype, offset=HEAD_BYTES)


def resident_bytes(path: Path) -> int:
    """Of the mappings of a file, as the system counts them."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.MULTILINE)
    found = [entry for entry in entries if str(path) in entry.partition("\n")[0]]
    assert found, "it is mapped"
    return 1024 * sum(int(text) for entry in found for text in KB.findall(entry))


@needs_smaps
def test_a_check_and_a_fold_leave_no_page_of_a_large_update_behind(tmp_path: Path) -> None:
    size = 3 * PASS_VALUES + 1000
    spec = ParamSpec((TensorSpec("w", (size,), "float32"),))
    expected = np.arange(size, dtype=np.float32)
    values = mapped(tmp_path / "update", expected)
    assert np.array_equal(values, expected)
    assert resident_bytes(tmp_path / "update") >= values.nbytes, "each value was looked at"

    assert find_flaw(spec, values, 1, None) is None
    assert resident_bytes(tmp_path / "update") <= 2 * mmap.PAGESIZE

    total = np.ones(size, np.float32)
    add_scaled(total, 0.5, values)
    assert resident_bytes(tmp_path / "update") <= 2 * mmap.PAGESIZE
    assert np.array_equal(total, 1 + expected / 2)


def test_a_value_that_is_not_finite_is_found_in_each_pass(tmp_path: Path) -> None:
    size = 2 * PASS_VALUES + 5
    spec = ParamSpec((TensorSpec("w", (size,), "float32"),))
    for at in (0, PASS_VALUES - 1, PASS_VALUES, size - 1):
        bad = np.zeros(size, np.float32)
        bad[at] = np.nan
        flaw = find_flaw(spec, mapped(tmp_path / f"{at}", bad), 1, None)
        assert flaw is not None
        assert "1 values that are not finite" in flaw


@pytest.mark.parametrize("size", [0, 1, PASS_VALUES - 1, PASS_VALUES, PASS_VALUES + 1, 2 * PASS_VALUES])
def test_the_passes_are_all_of_it_in_order(tmp_path: Path, size: int) -> None:
    values = mapped(tmp_path / "some", np.arange(size, dtype=np.float32))
    for of in (values, np.array(values)):
        seen = [of[at].copy() for at in passes(of)]
        assert np.array_equal(np.concatenate(seen), np.arange(size, dtype=np.float32))
    assert len(list(passes(values))) == max(1, -(-size // PASS_VALUES))
    assert len(list(passes(np.array(values)))) == 1


def test_what_was_changed_in_memory_alone_stays(tmp_path: Path) -> None:
    """A copy-on-write mapping, as a simulator's models are: given back, its changes would be lost."""
    np.save(tmp_path / "model.npy", np.zeros(2 * PASS_VALUES, np.float32))
    model = np.load(tmp_path / "model.npy", mmap_mode="c")
    model += 1
    for at in passes(model):
        assert (model[at] == 1).all()
    assert (model == 1).all()


@pytest.mark.parametrize("size", [4, PASS_VALUES + 7])
@pytest.mark.parametrize("more", [-1, 1])
def test_an_update_of_another_length_is_refused(size: int, more: int) -> None:
    total = np.ones(size, np.float32)
    with pytest.raises(ValueError, match="broadcast"):
        add_scaled(total, 1.0, np.ones(size + more, np.float32))


def test_a_long_update_in_memory_is_added_as_a_short_one() -> None:
    size = 2 * PASS_VALUES + 3
    delta = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    total = np.zeros(size, np.float32)
    add_scaled(total, 0.25, delta)
    assert np.array_equal(total, np.float32(0.25) * delta)
