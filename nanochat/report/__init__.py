"""The report: every stage writes a section; `generate` makes report.md, report.json and pictures of the curves."""
