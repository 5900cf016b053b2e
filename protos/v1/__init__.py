"""Generated code of anabranch.v1; see scripts/generate_protos.py."""
