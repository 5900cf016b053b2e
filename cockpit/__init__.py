"""The cockpit: pages and figures of runs in a browser, whether they are live, simulated or over.

Records of what happens are folded into one picture of a run (`reports/picture/`), whoever tells them
(`source.py`); the pages ask for parts of it over HTTP (`app.py`). Who may ask: `doorkeeper.py`.
"""
