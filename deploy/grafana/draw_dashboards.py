#!/usr/bin/env python3
"""Draws the dashboards from Prometheus' answers to their queries, one PNG each, with gnuplot.

  draw_dashboards.py ANSWERS FOLDER [--panels=TITLE,TITLE]

ANSWERS is what tests/system/run_dashboards.py leaves in answers.json. --panels: only these, all in one picture, dashboard.png.
"""

import argparse
import json
import math
import os
import subprocess

COLUMNS = 4
WIDTH, HEIGHT = 440, 300  # of a panel, pixels
MOST_CURVES = 8
COLOURS = ["#3274d9", "#ff9830", "#56a64b", "#e02f44", "#8f3bb8", "#1fa5a5", "#b8860b", "#7b7b7b"]
# Grafana's units: what values are divided by, and what the axis says.
UNITS = {"bytes": (2**20, "MiB"), "percentunit": (0.01, "%"), "s": (1, "s"), "watt": (1, "W"), "celsius": (1, "C"), "hertz": (1e6, "MHz")}


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def at(points, t):
    """The value at `t`, 0 where there is none."""
    return next((v for s, v in points if abs(s - t) < 1e-3), 0)


def stack(curves):
    """Curves as Grafana stacks them, the last one drawn first; those of the driver are not stacked."""
    times = sorted({t for curve in curves for t, _ in curve["points"]})
    total, stacked, lines = dict.fromkeys(times, 0.0), [], []
    for curve in curves:
        if curve["legend"].startswith("driver:"):
            lines.append((curve, "lines lw 3"))
            continue
        for t in times:
            total[t] += at(curve["points"], t)
        stacked.append(({"legend": curve["legend"], "points": [[t, total[t]] for t in times]}, "filledcurves y1=0"))
    return stacked[::-1] + lines


def largest_first(curves):
    return sorted(curves, key=lambda curve: -max(abs(v) for _, v in curve["points"]))


def panel_script(panel, begin):
    scale, unit = UNITS.get(panel["unit"], (1, ""))
    curves = panel["curves"]
    if len(curves) > MOST_CURVES:
        curves = largest_first(curves)[:MOST_CURVES]
    styled = stack(curves) if panel["stacked"] else [(curve, "lines lw 2") for curve in curves]
    data, plots, values = "", [], []
    for index, (curve, style) in enumerate(styled):
        points = [(t - begin, v / scale) for t, v in curve["points"] if not math.isinf(v)]
        values += [v for _, v in points]
        data += f"$curve{index} << EOD\n" + "".join(f"{t:.1f} {v:.9g}\n" for t, v in points) + "EOD\n"
        plots.append(f"$curve{index} using 1:2 with {style} lc rgb '{COLOURS[index % len(COLOURS)]}' title {quoted(curve['legend'])}")
    title = panel["title"] + (f" ({unit})" if unit else "")
    low, high = min(values), max(values)
    around = abs(low) / 2 or 0.5
    limits = f"set yrange [{low - around:.9g}:{high + around:.9g}]\n" if low == high else "set yrange [*:*]\n"
    return data + limits + f"set title {quoted(title)}\nplot " + ", ".join(plots) + "\n"


def draw(panels, begin, path, columns):
    rows = -(-len(panels) // columns)
    script = (f"set terminal pngcairo noenhanced size {columns * WIDTH},{rows * HEIGHT} font 'sans,9'\nset output {quoted(path)}\n"
              f"set multiplot layout {rows},{columns}\nset xlabel 'seconds'\nset grid lc rgb '#dddddd'\nset key below samplen 1\n"
              "set style fill solid 0.85\n")
    script += "".join(panel_script(panel, begin) for panel in panels)
    subprocess.run(["gnuplot"], input=script, text=True, check=True)
    print(f"{path}: {len(panels)} panels, {os.path.getsize(path) / 1024:.0f} KiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers")
    parser.add_argument("folder")
    parser.add_argument("--panels", default="")
    args = parser.parse_args()
    with open(args.answers, encoding="utf-8") as file:
        run = json.load(file)
    for panel in (panel for dashboard in run["dashboards"] for panel in dashboard["panels"]):
        for curve in panel["curves"]:
            curve["legend"] = curve["legend"].removeprefix(run["job"] + ": ")
    os.makedirs(args.folder, exist_ok=True)
    if args.panels:
        by_title = {panel["title"]: panel for dashboard in run["dashboards"] for panel in dashboard["panels"] if panel["curves"]}
        panels = [by_title[title] for title in args.panels.split(",")]
        draw(panels, run["begin"], os.path.join(args.folder, "dashboard.png"), columns=min(len(panels), 3))
        return
    for dashboard in run["dashboards"]:
        panels = [panel for panel in dashboard["panels"] if panel["curves"]]
        draw(panels, run["begin"], os.path.join(args.folder, dashboard["name"] + ".png"), COLUMNS)


main()
