"""Makes the report of a run (report.md, report.html and report.json), and compares several runs.

During a run, each stage writes its figures as a section. `python -m nanochat.report generate` turns
the sections into one report. Read the files in this order:

- sections.py: what each stage writes, and which sections belong to one run.
- summary.py: the host, the table of measures by stage, and the headline figures.
- words.py: titles, names and meanings of measures in the user's language.
- curves.py draws the curves of a stage, markdown.py writes the text, html.py makes one HTML file.
- compare.py: several finished runs side by side.
- golden.py: the losses that known runs must have (golden.json), and how a run compares with them;
  check.py trains such a run, and says whether the machine computes right.
- __main__.py: the command line, which generates, shows, compares and deletes.
"""
