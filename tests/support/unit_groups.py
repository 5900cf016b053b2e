"""Models with units, by the name that the tests know."""

from __future__ import annotations

from anabranch.testing.models import CELLS as CELLS
from anabranch.testing.models import GROUPS as GROUPS
from anabranch.testing.models import HIDDEN as HIDDEN
from anabranch.testing.models import SPEC as SPEC
from anabranch.testing.models import line as line
from anabranch.testing.models import tensors as tensors
