"""has_packages.py FILE|NAME==VERSION ...: whether this Python has what requirements files, and single requirements, ask for. Needs no network."""

import importlib.metadata
import re
import sys


def lines(argument):
    if not argument.endswith(".txt"):
        return [argument]
    with open(argument, encoding="utf-8") as file:
        return list(file)


for line in (line for argument in sys.argv[1:] for line in lines(argument)):
    name, _, version = line.split("#")[0].strip().partition("==")
    name = re.split("[<>=]", name)[0]
    if not name or name.startswith("-"):
        continue
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(1)
    if version and found.split("+")[0] != version:
        sys.exit(1)
