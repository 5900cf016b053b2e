"""The small federation of `anabranch.testing`, by the name that the tests know."""

from __future__ import annotations

from anabranch.testing.federation import BASE as BASE
from anabranch.testing.federation import config as config
from anabranch.testing.federation import first_weights as first_weights
from anabranch.testing.federation import result_of as result_of
