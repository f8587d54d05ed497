#!/usr/bin/env python3
"""Prints why cases of a run of ctest were skipped, then one line 'N passed, N failed[, N skipped]'.

  count_tests.py DIR

DIR holds ctest.junit, CTest's report, and for each GoogleTest binary that reached its end NAME.xml, its cases. A test without cases of its own,
or one that died or ran out of time, counts as one. Exits with 1 if anything failed.
"""

import collections
import os
import sys
import xml.etree.ElementTree as ElementTree


def reason_of(case):
    """GoogleTest writes 'file:line', then the words of GTEST_SKIP."""
    skipped = case.find("skipped")
    words = (skipped.get("message") or skipped.text or "") if skipped is not None else ""
    return " ".join(words.split("\n")[1:]).strip() or "no reason given"


def count_cases(path, reasons):
    counts = collections.Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None:
            counts["failed"] += 1
        elif case.get("status") == "notrun":
            continue  # disabled or filtered out
        elif case.get("result") == "skipped" or case.find("skipped") is not None:
            counts["skipped"] += 1
            reasons[reason_of(case)] += 1
        else:
            counts["passed"] += 1
    return counts


def main():
    folder = sys.argv[1]
    total, reasons = collections.Counter(), collections.Counter()
    for test in ElementTree.parse(os.path.join(folder, "ctest.junit")).iter("testcase"):
        status = test.get("status")  # run, fail, notrun, disabled
        cases_path = os.path.join(folder, test.get("name") + ".xml")
        counts = count_cases(cases_path, reasons) if os.path.exists(cases_path) else collections.Counter()
        if status == "fail" and counts["failed"] == 0:
            counts["failed"] = 1
        elif status == "disabled" or (status == "notrun" and test.find("skipped") is not None):
            counts["skipped"] += 1
        elif status == "notrun":
            counts["failed"] += 1
        elif not counts:
            counts["passed"] = 1
        total += counts
    for reason, count in reasons.most_common():
        print(f"skipped {count}: {reason}")
    line = f"{total['passed']} passed, {total['failed']} failed"
    if total["skipped"]:
        line += f", {total['skipped']} skipped"
    print(line)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
