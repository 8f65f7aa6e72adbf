"""Checkpoints: how a stage saves, resumes and loads a model, and where checkpoints are stored.

A checkpoint is a folder `step_NNNNNN` inside the folder of a run, such as base_checkpoints/d20. It
holds the parameters, the tokenizer, each rank's optimizer state (unless the checkpoint was
converted), and meta.json, which describes the model and the run and records a hash of each of these
files.

Read the modules in this order:
  files      step folders: their names, meta.json and hashes; publishes, verifies and prunes them
  locate     finds the folder for a stage and a tag, and what meta.json says about a run
  families   maps the model family that meta.json names to its classes
  tensors    safetensors files, written one tensor at a time
  parts/     each rank's share of the parameters and of the optimizer state
  save       writes a step, so that all ranks succeed or all fail
  load       builds a model that is ready to use
  same_run   refuses to resume with other settings, data or code
  resume     decides which step a stage resumes from, and restores it
Then the formats of other programs:
  huggingface/   published models, their tokenizers and chat templates, and peft adapters
  upstream       conversion of karpathy/nanochat's checkpoints (`python -m` this package)
"""
