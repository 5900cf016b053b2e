"""`make mutants`: small changes to the code, and whether the tests of their own subject notice them."""
