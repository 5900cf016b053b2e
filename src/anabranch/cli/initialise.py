"""`init`: from an App to the folder that a server starts from."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.configuration import BROUGHT, load_config, read_settings
from anabranch.cli.next_steps import command_line
from anabranch.cli.options import AsJson, FlowerFolder, Overrides, coming_back, writing
from anabranch.cli.output import Output
from anabranch.cli.run_options import RunSource, run_source, with_an_app
from anabranch.compress.model import frozen_size_bytes
from anabranch.core.errors import AnabranchError
from anabranch.core.model.growing import stage_set
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.units import layer_text
from anabranch.reports.text import bytes_text, count_text
from anabranch.workloads.numpy_trainer import NumpyTrainer
from anabranch.workloads.trainer import Trainer

AppName = Annotated[
    str,
    typer.Argument(help="A built-in workload, module:App or path.py:App.", metavar="APP", show_default=False),
]
DataPath = Annotated[str, typer.Option("--data-path", help="Where the App finds its data.")]

WIDTHS_MAX = 8  # that the text names; the JSON has all
MODEL_FOLDER = Path("anabranch-model")
RUN_FILE = Path("run.toml")  # as `anabranch new` calls it
BECOMES = {
    "average": "averaged",
    "latest": "those of the newest update",
    "local": "of which each device keeps its own",
}
UNLESS = "unless the server's settings say another model.buffers"


def init(
    source: RunSource = "",
    flower: FlowerFolder = None,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", metavar="DIR")] = MODEL_FOLDER,
    seed: Annotated[int, typer.Option(help="The seed of the first weights.")] = 0,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="First weights that an export has written.", metavar="FILE"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another model that is in the folder.")
    ] = False,
    data_path: DataPath = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write the manifest and the first weights of an App's model, for a server to start from.

    A file of settings names its App, which is told what they are. The manifest also says which units
    (neurons, channels, heads) a sub-model may leave out, and which tensors are buffers. Settings that the App
    brings along are written beside it. A folder with another model stays as it is.
    """
    from anabranch.server.manifest import check_free, check_frozen, read_weights, write_manifest
    from anabranch.workloads import load_app, trainer_for
    from anabranch.workloads.calls import join_run, settings_of

    config, _, named = run_source(source, flower)
    with coming_back():
        settings = with_an_app(load_config(config, overrides or (), flags=named), None)
        app = settings.run.workload
        found = load_app(app, data_path or settings.run.data_path)
        join_run(found, settings.to_json())
        trainer = trainer_for(found)
        initial, brought = trainer.initial(seed), settings_of(found, seed)
        if isinstance(trainer, NumpyTrainer) and found.any_model:
            trainer.adopt(trainer.described(initial))
    spec = trainer.spec
    first = initial if weights is None else read_weights(weights, spec)
    check_frozen(spec, settings.limits)
    if not force:
        check_free(out, first, spec)
    with writing(out):
        built_from = seed if weights is None else None
        parts = spec.groups, spec.buffers, spec.slices
        write_manifest(out, app, first, *parts, built_from, spec.stages)
        if brought:
            (out / BROUGHT).write_text(json.dumps(brought, indent=1) + "\n", encoding="utf-8")
    _tell_model(Output(as_json), out, app, spec, trainer, settings.model.buffers, config)


def _settings_of(app: str, config: Path | None) -> list[str]:
    """The file that was named, or that of runs of this App which lies here, as `anabranch new` makes it."""
    if config is not None:
        return [str(config)]
    run = None
    with suppress(AnabranchError):  # a file that is broken is told of by the server
        run = read_settings(RUN_FILE).get("run")
    return [str(RUN_FILE)] if isinstance(run, dict) and run.get("workload") == app else []


def _tell_model(
    output: Output,
    out: Path,
    app: str,
    spec: ParamSpec,
    trainer: Trainer,
    policy: str,
    config: Path | None,
) -> None:
    """What was written, what a sub-model may leave out, and what becomes of buffers."""
    parameters, because = sum(t.size for t in spec.tensors), trainer.whole_because
    units = [{"name": group.name, "units": group.size} for group in spec.groups]
    layers = ", ".join(f"{group.size} of {layer_text(group.name)}" for group in spec.groups)
    lines = [f"{out}: {count_text(parameters)} parameters in {len(spec.tensors)} tensors"]
    if spec.buffers:
        numbers = count_text(spec.buffer_places.size)
        lines.append(f"buffers: {len(spec.buffers)} tensors of {numbers} numbers, {BECOMES[policy]} {UNLESS}")
    frozen_bytes = frozen_size_bytes(spec)
    if frozen_bytes:
        trained = count_text(spec.size)
        lines.append(f"trained: {trained} numbers; {bytes_text(frozen_bytes)} are frozen, fetched once")
    if spec.stages:
        last = count_text(stage_set(spec, len(spec.stages)).size)
        lines.append(
            f"stages: {len(spec.stages)}, the last of {last} numbers (submodel.name = 'progressive')"
        )
    lines.append(f"sub-models may leave out units: {layers}" if units else f"no sub-models: {because}")
    if trainer.whole_widths:
        named = [f"{w.units} of {layer_text(w.name)} ({w.because})" for w in trainer.whole_widths]
        more = f" and {len(named) - WIDTHS_MAX} more" if len(named) > WIDTHS_MAX else ""
        lines.append(f"whole in each: {', '.join(named[:WIDTHS_MAX])}{more}")
    lines += ["start with:", f"  {command_line('server', *_settings_of(app, config), '--model', out)}"]
    output.result(
        {
            "folder": str(out),
            "app": app,
            "parameters": parameters,
            "layout_sha256": spec.layout_hash,
            "buffers": list(spec.buffers),
            "trained": spec.size,
            "frozen_bytes": frozen_bytes,
            "units": units,
            "whole_because": because,
            "whole_widths": [asdict(width) for width in trainer.whole_widths],
        },
        "\n".join(lines),
    )
