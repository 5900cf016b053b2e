"""The models that are in use: one copy of a version, however many devices train from it."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from anabranch.compress.codec import Codec
from anabranch.compress.model import decode_model, encode_model
from anabranch.core.engine import Engine
from anabranch.core.params import Tensors, Vector


@dataclass(frozen=True, eq=False)
class Model:
    """A version as the devices decode it: `vector` (size,), and the bytes that it took on the wire."""

    version: int
    vector: Vector
    payload_bytes: int


class Versions:
    """The engine's current model, encoded once a version.

    A model lives as long as somebody holds it, and the engine may write on its own vector meanwhile.
    """

    def __init__(self, engine: Engine, codec: Codec, frozen: Tensors) -> None:
        self._engine, self._codec, self._frozen = engine, codec, frozen
        self._in_use: WeakValueDictionary[int, Model] = WeakValueDictionary()

    def current(self) -> Model:
        """The model of the engine's version."""
        engine = self._engine
        model = self._in_use.get(engine.version)
        if model is None:
            data = encode_model(self._codec, engine.spec, engine.vector, self._frozen)
            vector, _ = decode_model(self._codec, engine.spec, data)
            model = self._in_use[engine.version] = Model(engine.version, vector, len(data))
        return model

    def in_use(self) -> list[int]:
        """The versions that somebody holds."""
        return sorted(self._in_use)
