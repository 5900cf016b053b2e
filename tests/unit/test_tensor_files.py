"""Safetensors files without copies: the library's own bytes, each value as it was, and nothing held."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import SafetensorError
from safetensors.numpy import save

from anabranch.compress.model import model_sha256
from anabranch.core.errors import ConfigError, StoreCorrupt
from anabranch.core.limits import MIB
from anabranch.core.model.arrays import own, pieces
from anabranch.core.model.params import ParamSpec
from anabranch.server.manifest import read_manifest, read_weights, write_manifest
from anabranch.server.store.tensors import DTYPES, TensorFile, write_tensors

KINDS = st.sampled_from([np.dtype(name) for name in DTYPES])
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable() and name != "__metadata__"),
    arrays.arrays(KINDS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=8,
)


@given(tensors=TENSORS)
def test_a_file_has_the_librarys_bytes(tensors: dict[str, npt.NDArray[np.generic]]) -> None:
    file = io.BytesIO()
    write_tensors(file, tensors)
    assert file.getvalue() == save(tensors)


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "of several pieces": rng.normal(size=(3, MIB // 8 + 5)).astype(np.float64),
        "a number": np.array(7, np.int64),
        "nothing": np.empty((0, 2), np.float16),
        "flags": np.array([True, False]),
    }
    (path := tmp_path / "t.safetensors").write_bytes(save(tensors))
    found = TensorFile(path)
    path.unlink()
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found.dtype(name) == tensor.dtype
        assert found.shape(name) == found[name].shape == tensor.shape
        assert found[name].tobytes() == own(found, name).tobytes() == tensor.tobytes()
        assert b"".join(p.tobytes() for p in pieces(found, name)) == tensor.tobytes()
        assert all(p.nbytes <= MIB for p in pieces(found, name))


def test_it_may_not_change_meanwhile(tmp_path: Path) -> None:
    (path := tmp_path / "t.safetensors").write_bytes(save({"w": np.zeros(4, np.float32)}))
    found = TensorFile(path)
    status = path.stat()
    path.write_bytes(save({"w": np.ones(4, np.float32)}))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(StoreCorrupt, match="written to"):
        found["w"]
    path.write_bytes(b"")
    with pytest.raises(StoreCorrupt, match="written to"):
        list(found.pieces("w"))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, save({"w": np.zeros(4)})[:-1]], ids=["none", "zeros", "cut"]
)
def test_what_is_no_such_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "t.safetensors").write_bytes(data)
    with pytest.raises(SafetensorError):
        TensorFile(path)


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        TensorFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        TensorFile(tmp_path / "none")


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, "test", {"w": np.zeros(4, np.float32)})
    found = TensorFile(tmp_path / "initial.safetensors")

    def failed(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failed)
    with pytest.raises(StoreCorrupt, match=r"initial.safetensors cannot be read \(Input/output error\)"):
        found["w"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_manifest(tmp_path)


def test_weights_may_come_through_a_pipe(tmp_path: Path) -> None:
    tensors = {"w": np.arange(4, dtype=np.float32)}
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_bytes, args=(save(tensors),))
    writer.start()
    found = read_weights(pipe, ParamSpec.of(tensors))
    writer.join()
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_its_descriptor_goes_with_it(tmp_path: Path) -> None:
    (path := tmp_path / "t.safetensors").write_bytes(save({"w": np.zeros(4, np.float32)}))
    open_before = len(os.listdir("/proc/self/fd"))
    found = TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == open_before + 1
    del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_model_is_digested_checked_and_flattened_without_a_second_copy(tmp_path: Path) -> None:
    tensors: dict[str, npt.NDArray[Any]] = {
        "w": np.arange(4 * MIB, dtype=np.float32),
        "n": np.array(3, np.int64),
    }
    (path := tmp_path / "t.safetensors").write_bytes(save(tensors))
    spec, size = ParamSpec.of(tensors), 16 * MIB
    expected = model_sha256(spec, tensors)
    del tensors
    found = TensorFile(path)
    tracemalloc.start()
    try:
        assert model_sha256(spec, found) == expected
        assert tracemalloc.get_traced_memory()[1] < size / 4
        assert spec.flatten(found)[-1] == 4 * MIB - 1
        assert tracemalloc.get_traced_memory()[1] < 1.25 * size
    finally:
        tracemalloc.stop()
