"""docs/jobs.md: two runs on one server, and a device that goes from one to the other."""

from signal import SIGINT

from walking import End, Wait, Walk, Write, starts, types

RUN = """
[run]
workload = "synthetic"
updates_max = 4
[strategy]
name = "fedbuff"
buffer_size = 2
[client]
steps = 10
"""
SERVER = "anabranch server --jobs jobs"
WARD = "anabranch client synthetic --jobs --id ward-1"

JOBS = Walk(
    "two jobs",
    page="docs/jobs.md",
    needs="server",
    steps=(
        Write("run.toml", RUN),
        types("anabranch init synthetic"),
        types("anabranch admin jobs add wards", says="a job for devices ward-"),
        types("anabranch admin jobs add everybody", says="a job for every device"),
        starts(SERVER, until="job everybody: running"),
        types("anabranch admin jobs list", says="wards"),
        types("anabranch admin status", says="wards "),
        types("anabranch client synthetic --server", says="4 updates answered"),
        starts(WARD, until="job wards .synthetic. begins"),
        Wait(WARD, says="waiting for a job"),
        Wait(SERVER, says="job wards: ended"),
        types("anabranch admin jobs stop", says="wards stops"),
        Wait(SERVER, says="job wards: stopped"),
        types("anabranch verify jobs/wards/data", says="sound"),
        types("anabranch admin jobs start", says="wards goes on"),
        End(WARD, by=SIGINT, says="stopped"),
        End(SERVER, by=SIGINT, says="drained"),
    ),
)

WALKS = (JOBS,)
