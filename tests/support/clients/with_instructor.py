"""instructor: nested models in the modes TOOLS, JSON and JSON_SCHEMA, and lists of them in parts."""

import json
import sys

import instructor
from forms import QUESTION, Cat
from openai import OpenAI

url, model_name = sys.argv[1:]
answers = {}
for mode in ("TOOLS", "JSON_SCHEMA", "JSON", "MD_JSON", "RESPONSES_TOOLS"):
  client = instructor.from_openai(OpenAI(base_url=url, max_retries=0), mode=instructor.Mode[mode])
  try:
    cat = client.chat.completions.create(
        model=model_name,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        response_model=Cat,
        max_retries=0,
        max_tokens=200,
    )
    answers[mode] = type(cat).__name__
  except Exception as e:
    answers[mode] = repr(e)[:300]
print(json.dumps(answers))
