"""docs/systems.md: each method that works takes the bytes that the page says; two others, live too."""

from signal import SIGINT

from walking import End, Walk, Write, also, also_starts, starts, types

DIGITS = "anabranch simulate digits "
SYNTHETIC = "anabranch simulate synthetic --updates 100 --strategy fedasync --set strategy.alpha=0.5 "

GROWING, GREW = "examples/growing.py:Growing", r"48 updates"

SYSTEMS = Walk(
    "the systems",
    page="docs/systems.md",
    copies=("examples",),
    steps=(
        types(f"{DIGITS}--strategy teasq --updates", says=r"3\d\.\d kB up"),
        types(f"{DIGITS}--strategy asyncdrop", says=r"8\d\d kB up"),
        types(f"{DIGITS}--strategy teasq_drop", says=r"2\d\.\d kB up"),
        types(f"{SYNTHETIC}--set client.push=elastic --set client.push_when=interval", says="100 updates"),
        types(f"{SYNTHETIC}--set client.push=elastic --set client.push_when=change", says="100 updates"),
        types(f"{DIGITS}--strategy qafel", says=r"10\d kB up"),
        types(f"{DIGITS}--updates 60 --set 'uplink.codec=ef(0.9)|threshold", says=r"2\d\.\d kB up"),
        types(f"{DIGITS}--updates 60 --set 'uplink.codec=ef(0.9)|topk", says=r"2\d\.\d kB up"),
        types(f"{DIGITS}--strategy fedavg", says=r"29\d kB up"),
        types(f"{DIGITS}--strategy fadas", says=r"1\.1\d MB up"),
        *(types(f"{DIGITS}--strategy {name} ", says=r"1\.1\d MB up") for name in ("ca2fl", "ace", "aced")),
        types(f"{DIGITS}--updates 60 --strategy fedasync", says=r"\d\d\.\d kB up"),
        types(f"{DIGITS}--strategy fedcompass", says=r"1\.1\d MB up"),
        *(
            types(f"{DIGITS}--strategy {name} ", says=r"1\.1\d MB up")
            for name in ("port", "fedasmu", "fedfa")
        ),
        types(f"anabranch simulate {GROWING} --versions 12", says=GREW),
        types(f"{DIGITS}--updates 60 --set fleet.arrival=stream", says="60 updates"),
        types("anabranch compare runs/", says="teasq_drop"),
    ),
)

SMALL, SERVER = "examples/subspace.py:Small", "anabranch server --model numbers"
LARGER = """
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace

App = Subspace(Digits(), 300)
"""

SUBSPACE = Walk(
    "a subspace",
    page="docs/subspace.md",
    copies=("examples",),
    steps=(
        types(f"anabranch simulate {SMALL} --updates 200 --set client.learning", says=r"6\d\.\d kB up"),
        # Differences of losses are all that it goes by, so last bits decide: other processors end elsewhere.
        types(f"anabranch simulate {SMALL} --updates 200 --set client.gradient", says=r"accuracy [78]\d\."),
        also(f"anabranch init {SMALL} --out numbers"),
        also_starts(SERVER, until="serving"),
        also(f"anabranch client {SMALL} --id a --tasks-max 3", says="3 updates"),
        Write("larger.py", LARGER),
        also("anabranch client larger.py:App --id b --tasks-max 1", ends=11),
        also(f"anabranch admin export whole.safetensors --merge {SMALL}", says="whole.safetensors"),
        End(SERVER, by=SIGINT, says="drained"),
    ),
)

GROWS = "--versions 6 --set submodel.name=progressive --set submodel.warm_up_versions=1"
GROWING_SERVER = f"anabranch server --model grows {GROWS} --strategy fedasync"

SUBMODELS = Walk(
    "a model that grows",
    page="docs/submodels.md",
    copies=("examples",),
    steps=(
        types(f"anabranch simulate {GROWING} --versions 40", says="of 400 updates"),
        also(f"anabranch init {GROWING} --out grows", says="stages: 4, the last of 33,482"),
        also_starts(GROWING_SERVER, until="serving"),
        also(f"anabranch client {GROWING} --id a --tasks-max 4", says="4 updates"),
        also(f"anabranch evaluate {GROWING} --once --admin 127.0.0.1:7071", says="accuracy"),
        also("anabranch admin export last.safetensors --stage 4", says="version 4"),
        End(GROWING_SERVER, by=SIGINT, says="drained"),
    ),
)

GATED = "examples/gated.py:Gated"
GATED_SERVER = "anabranch server --model gated --strategy asyncdrop --updates 6"
NARROW_FLEET = 'anabranch simulate digits --updates 200 --set "fleet.widths_max=[1.0, 0.5]"'

GATED_UNITS = Walk(
    "gated units",
    page="docs/submodels.md",
    copies=("examples",),
    steps=(
        types(f"anabranch init {GATED}", says="units: 64 of blocks.0.mlp.gate, 64 of blocks.1.mlp.gate"),
        types(f"anabranch simulate {GATED}", says=r"4\.\d\d MB up"),
        also_starts(GATED_SERVER, until="serving"),
        also(f"anabranch client {GATED} --id a --tasks-max 2", says="2 updates"),
        types(f"anabranch client {GATED} --id small --width-max 0.5", says="updates"),
        types("anabranch admin clients", says=r"small .* 0\.5 +\d+(\.\d+)? [GM]B"),
        also(f"anabranch client {GATED} --id tiny --width-max 0.001", ends=2, says=r"width_max = 0\.0157"),
        also(f"anabranch evaluate {GATED} --once --admin 127.0.0.1:7071", says="accuracy"),
        End(GATED_SERVER, by=SIGINT, says="drained"),
        types(f"{NARROW_FLEET} --set submodel.name=random", says="of 200 updates"),
        types(f"{NARROW_FLEET} --out runs/whole", says="4 of 8 devices were not let in"),
    ),
)

HEAD, FROZEN_SERVER = "examples/frozen.py:Head", "anabranch server --model head"

FROZEN = Walk(
    "frozen weights",
    page="docs/frozen.md",
    copies=("examples",),
    steps=(
        types(f"anabranch simulate {HEAD} --updates 100", says=r"4\.00 MB up"),
        types(f"anabranch init {HEAD} --out head", says=r"260 kB are frozen"),
        also_starts(FROZEN_SERVER, until="serving"),
        also(f"anabranch client {HEAD} --id a --tasks-max 3", says="3 updates"),
        also(f"anabranch evaluate {HEAD} --once", says="accuracy"),
        End(FROZEN_SERVER, by=SIGINT, says="drained"),
    ),
)

BUILT = "--set run.initial=built --set downlink.codec='\"log(2)\"'"
SELDOM = "--set downlink.publish_every_versions=4"
BUILT_SERVER = f"anabranch server --model model {BUILT}"

DOWNLINK = Walk(
    "version 0 without a download",
    page="docs/downlink.md",
    steps=(
        types(f"anabranch simulate synthetic --updates 100 {BUILT}", says="kB down"),
        also("anabranch init synthetic --out model"),
        also_starts(BUILT_SERVER, until="serving"),
        also("anabranch client synthetic --id a --tasks-max 1", says="built version=0"),
        also("anabranch admin status", says=r" 0 B down"),
        End(BUILT_SERVER, by=SIGINT, says="drained"),
        also(f"anabranch simulate synthetic --updates 60 {BUILT} {SELDOM} --out seldom", says="kB down"),
        also("anabranch replay seldom", says="digests equal"),
    ),
)

ADAPTED, ADAPTED_SERVER = "examples/adapters.py:Adapted", "anabranch server --model adapted"
ADAPTED_DEVICE = f"anabranch client {ADAPTED} --id device-0"
MERGED = """
import sys
sys.path.insert(0, "examples")
from adapters import Adapted, Whole
from safetensors.numpy import load_file, save_file
from anabranch.workloads.adapters import merged

save_file(merged(Adapted().model(), load_file("runs/adapted/final.safetensors")), "simulated.safetensors")
Whole("simulated.safetensors").model()
"""

ADAPTERS = Walk(
    "adapters",
    page="docs/adapters.md",
    copies=("examples",),
    steps=(
        types("anabranch simulate examples/adapters.py:Whole", says=r"1\d\.\d MB up"),
        types(f"anabranch simulate {ADAPTED} --updates", says=r"1\.36 MB up"),
        types(f"anabranch simulate {ADAPTED} --set submodel.name=alternate", says="748 kB up"),
        Write("merged.py", MERGED),
        also("python merged.py"),
        types(f"anabranch init {ADAPTED}", says=r"3,402 numbers; 71\.0 kB are frozen"),
        starts(ADAPTED_SERVER, until="serving"),
        starts(ADAPTED_DEVICE, until="pushed"),
        types(f"anabranch admin export merged.safetensors --merge {ADAPTED}", says="merged.safetensors"),
        also("anabranch init examples/adapters.py:Whole --weights merged.safetensors --out plain"),
        End(ADAPTED_DEVICE, by=SIGINT),
        End(ADAPTED_SERVER, by=SIGINT, says="drained"),
    ),
)

WALKS = (SYSTEMS, SUBSPACE, SUBMODELS, GATED_UNITS, FROZEN, DOWNLINK, ADAPTERS)
