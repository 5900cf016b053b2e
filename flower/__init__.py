"""L3, Flower both ways: its ClientApps in our federations, our strategies on its Grid.

The only folder that imports flwr (the extra `flower`). `flwr_version` is called before anything of it is
imported; importing this package alone imports nothing.
"""
