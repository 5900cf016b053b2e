"""L1: the files of a run folder: `result.json`, `report.html`, `events.jsonl`, and comparisons."""
