"""A version of a run whose model grows as a file: all of it, or what one stage needs, by the command."""

from __future__ import annotations

from pathlib import Path

from commands import anabranch, answer, serving
from growing_app import names_of
from safetensors.numpy import load_file

from anabranch.core.errors import OUTCOMES, ConfigError

APP = f"{Path(__file__).parents[1] / 'support' / 'growing_app.py'}:App"
GROWN = ("--set", "submodel.name=progressive", "--set", "submodel.warm_up_versions=0", "--versions", 4)


def test_one_stage_is_written_and_the_others_heads_are_not(tmp_path: Path) -> None:
    answer(anabranch(tmp_path, "init", APP, "--json"))
    addresses = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--strategy", "fedasync")
    with serving(tmp_path, *addresses, *GROWN) as said:
        device = ("--server", said["address"], "--id", "device-0", "--tasks-max", 3)
        answer(anabranch(tmp_path, "client", APP, *device, "--json"))
        admin = ("--admin", said["admin_address"], "--json")

        def export(file: str, *options: object) -> dict[str, object]:
            return answer(anabranch(tmp_path, "admin", "export", file, *options, *admin))

        assert export("all.safetensors")["version"] == 3
        for stage in (1, 2, 3):
            export(f"{stage}.safetensors", "--stage", stage)
        for options, words in (
            (("--stage", 4), "there is no stage 4: this run's model has 3 stages"),
            (("--stage", 1, "--merge", APP), "--stage or --merge"),
        ):
            done = anabranch(tmp_path, "admin", "export", "none.safetensors", *options, *admin)
            assert done.returncode == OUTCOMES[ConfigError].exit_code
            assert words in done.stderr
        assert not (tmp_path / "none.safetensors").exists()
    whole = load_file(tmp_path / "all.safetensors")
    assert set(whole) == names_of((1, 2, 3), 1) | names_of((), 2) | names_of((), 3)
    for stage in (1, 2, 3):
        found = load_file(tmp_path / f"{stage}.safetensors")
        assert set(found) == names_of(tuple(range(1, stage + 1)), stage)
        assert all((found[name] == whole[name]).all() for name in found)
