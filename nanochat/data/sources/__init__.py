"""The sources of documents: published corpora, lists of web addresses, your own files, TinyWorld.

Read in this order:

1. published.py   the published corpora that --data knows by name; add a corpus there
2. fetch.py       fetches the files of a published corpus as shards; hub.py has the addresses
3. folder.py      writes TinyWorld, and corpora from your own files, which textfiles.py reads
4. urls.py        fetches the files of a list of addresses and imports them like your own
5. records.py     reads files of records (JSON, CSV, parquet); listing.py finds the files, and
                  encodings.py opens them
6. download.py    downloads files over HTTP: resumes, retries, checks, renames into place
"""
