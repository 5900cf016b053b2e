"""Which extra of the package brings which module: what to say where one is not installed."""

from __future__ import annotations

EXTRAS: dict[str, str] = {
    "torch": "client",
    "sqlalchemy": "server",
    "alembic": "server",
    "prometheus_client": "server",
    "grpc_health": "server",
    "grpc_reflection": "server",
    "cryptography.hazmat.primitives.hpke": "secagg",  # releases that the base install takes lack it
    "psycopg": "postgresql",
    "blake3": "blake3",
    "sklearn": "workloads",
    "flwr": "flower",
    "ray": "ray",
    "starlette": "cockpit",
    "uvicorn": "cockpit",
    "pandas": "frames",
    "polars": "frames",
    "transformers": "transformers",
    "accelerate": "transformers",
    "peft": "peft",
    "lightning": "lightning",
    "opacus": "opacus",
    "tensorboardX": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "cramjam": "prometheus",
    "optuna": "optuna",
    "resvg_py": "png",
    "opentelemetry": "tracing",
    "pytest": "testing",
}


def how_to_install(module: str | None) -> str:
    """The command that brings a module of this name, or one below it; empty for a stranger's."""
    name = module or ""
    extra = EXTRAS.get(name) or EXTRAS.get(name.partition(".")[0])
    return f'pip install "anabranch[{extra}]"' if extra else ""
