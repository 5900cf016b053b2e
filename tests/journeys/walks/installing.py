"""How the environments of the walks are made: the pages' own lines for pip."""

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "base": ("pip install anabranch",),
    "figures": ('pip install "anabranch[png]"',),
    "server": ('pip install "anabranch[server]"',),
    "server-and-protoc": ('pip install "anabranch[server]"', "pip install grpcio-tools==1.81.1"),
    # One after the other into one environment, as somebody comes to need them.
    "all": (
        'pip install "anabranch[server]"',
        'pip install "anabranch[client]"',
        'pip install "anabranch[workloads]"',
        'pip install "anabranch[flower]"',
        'pip install "anabranch[server,postgresql]"',
        'pip install "anabranch[ray]"',
        'pip install "anabranch[client,server,workloads,flower]"',
        'pip install "flwr[simulation]"',
        'pip install "anabranch[client,server,workloads,testing]"',
    ),
}
