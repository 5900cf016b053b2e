"""Speed and learning, measured: ratios within one run, and studies with equal tuning budgets."""
