"""A night as JUnit XML: one case a law. Failed is a failure; insufficient data is an error, never skipped and never passed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping

from regression.laws import Outcome
from regression.measurement import Measurement

# What XML 1.0 cannot hold, for instance the colours in an error message.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(measured: Measurement, outcomes: Mapping[str, Outcome]) -> str:
    """The text of the file."""
    kinds = [outcome.kind for outcome in outcomes.values()]
    suite = ET.Element(
        "testsuite",
        name="regression.nightly",
        timestamp=measured.time,
        time=f"{measured.seconds:.1f}",
        tests=str(len(kinds)),
        failures=str(kinds.count("FAIL")),
        errors=str(kinds.count("INSUFFICIENT")),
        skipped="0",
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in (("series", measured.series), ("tokens_per_second_per_device", measured.per_device)):
        ET.SubElement(properties, "property", name=name, value=_clean(str(value)))
    for name, outcome in outcomes.items():
        case = ET.SubElement(suite, "testcase", classname="regression.nightly", name=name, time="0")
        text = _clean(outcome.sentence)
        if outcome.kind == "FAIL":
            ET.SubElement(case, "failure", message=text).text = text
        elif outcome.kind == "INSUFFICIENT":
            ET.SubElement(case, "error", message=f"INSUFFICIENT DATA: {text}", type="insufficient data").text = text
        else:
            ET.SubElement(case, "system-out").text = text
        for hazard in outcome.hazards:
            ET.SubElement(case, "system-err").text = _clean(f"hazard {hazard}")
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
