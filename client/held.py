"""The version that a device has whole, kept on its disk: after a restart it need not be fetched again."""

from __future__ import annotations

from pathlib import Path

from anabranch.client.records import SUFFIX, Record, read_record, write_record
from anabranch.client.trainer import BaseModel
from anabranch.core.params import ParamSpec

FILE, VECTOR, FROZEN = f"held{SUFFIX}", "vector", "frozen/"


def keep_model(state_dir: Path, model: BaseModel, run_id: str, spec: ParamSpec) -> None:
    """Write the model in the place of an older one. It is a cache, so nothing waits for the disk."""
    frozen = {f"{FROZEN}{name}": array for name, array in model.frozen.items()}
    facts = {"version": model.version, "run_id": run_id, "layout_hash": spec.layout_hash}
    write_record(state_dir / FILE, Record({VECTOR: model.vector, **frozen}, facts), durable=False)


def kept_model(state_dir: Path, run_id: str, spec: ParamSpec) -> BaseModel | None:
    """The model of this run, or None where there is none."""
    record = read_record(state_dir / FILE)
    if record is None or (record.facts["run_id"], record.facts["layout_hash"]) != (run_id, spec.layout_hash):
        return None
    frozen = {n.removeprefix(FROZEN): a for n, a in record.arrays.items() if n.startswith(FROZEN)}
    return BaseModel(int(record.facts["version"]), record.arrays[VECTOR], frozen)
