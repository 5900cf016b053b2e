"""L4, what programs and notebooks do with the package; the command line is a layer over the same functions.

Its names are those of `import anabranch`. Whatever a program may do without torch, gRPC or a database is
imported without them.
"""
