#!/usr/bin/env python3
"""Makes a daemon's flags file from what its --help says: every flag with its meaning and default, those of the units set.

  make_flags.py PROGRAM [FILE]            writes FILE, default PROGRAM's name with .flags beside this script
  make_flags.py --check PROGRAM [FILE]    fails where FILE is not what this would write
"""
import difflib
import pathlib
import re
import subprocess
import sys
import textwrap

WIDTH = 120
# What the units need; all else has its default.
UNITS_OWN = {
    "rollout_server": {"model": "/var/lib/tandem/model", "run_dir": "/run/tandem", "data_dir": "/var/lib/tandem/rollout"},
    "trainer_server": {"model": "/var/lib/tandem/model", "run_dir": "/run/tandem", "data_dir": "/var/lib/tandem/trainer"},
}
FLAG = re.compile(r"--(\w+) \((.*?)\); default: (\S*?);(?= --|$)")


def flags_of(program):
    help_text = subprocess.run([program, "--help"], stdout=subprocess.PIPE, text=True, timeout=60).stdout
    sections = re.split(r"^  Flags from .*$", help_text, flags=re.M)[1:]
    text = " ".join(section.partition("\n\n")[0] for section in sections)
    flags = {name: (meaning, default.strip('"')) for name, meaning, default in FLAG.findall(" ".join(text.split()))}
    named = set(re.findall(r"^    --(\w+) \(", help_text, re.M))
    if not named or set(flags) != named:
        sys.exit(f"{program} --help: not understood: {sorted(named ^ set(flags))}")
    return flags


def flags_file(program):
    name = pathlib.Path(program).name
    own = UNITS_OWN[name]
    flags = flags_of(program)
    lines = [f"# Flags of {name}, read by --flagfile: one a line, NAME=VALUE. A line that is commented out shows a default.",
             "# tandem doctor says what of the node does not suit them. Made by make_flags.py.", ""]
    for flag in [*own, *sorted(set(flags) - set(own))]:
        meaning, default = flags[flag]
        lines += textwrap.wrap(meaning, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        lines += [f"--{flag}={own[flag]}" if flag in own else f"#--{flag}={default}", ""]
    return "\n".join(lines[:-1]) + "\n"


def main(arguments):
    is_check = arguments[:1] == ["--check"]
    arguments = arguments[is_check:]
    if len(arguments) not in (1, 2):
        sys.exit(__doc__)
    name = pathlib.Path(arguments[0]).name
    path = pathlib.Path(arguments[1]) if len(arguments) == 2 else pathlib.Path(__file__).parent / f"{name}.flags"
    wanted = flags_file(arguments[0])
    if not is_check:
        path.write_text(wanted)
        return
    found = path.read_text() if path.exists() else ""
    if found != wanted:
        sys.stdout.writelines(difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), str(path), "as --help says"))
        sys.exit(f"{path} is out of date: run {pathlib.Path(__file__).name} {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
