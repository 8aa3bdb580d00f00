"""The rooms of the package in their order."""

# From the values that know nothing to the command line that knows all. A room (a package as a
# whole, or a module that stands alone) imports from rows above its own, never from its own row.
# The rooms of a wing are listed one by one.
ROOMS = (
    ("common.errors", "common.machine", "common.pages", "common.types", "common.waiting"),
    ("common.inputs",),
    ("numerics", "recording"),
    ("kernels", "objectives", "schedules"),
    ("placement", "corrections", "optimizers"),
    ("model", "metrics"),
    ("policy", "tasks"),
    ("mismatch",),
    ("rl",),
    ("instruments.auditing", "instruments.diagnosis", "instruments.plan"),
    ("app.config",),
    ("app.run",),
    ("instruments.study",),
    ("api", "app.arguments"),
    ("app.jobs",),
    ("app.cli",),
    ("__main__",),
)
WINGS = ("common", "instruments", "app")
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}
