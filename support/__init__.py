"""The impure shelf under the first layer: other people's code, loaded and told apart from ours."""
