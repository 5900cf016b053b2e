"""A keeper: another party's process, which takes the masks off sums of updates and off nothing else."""
