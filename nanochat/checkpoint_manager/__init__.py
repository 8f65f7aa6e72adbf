"""Checkpoints: how a stage saves, resumes and loads a model, and which folders they lie in.

A checkpoint is a folder `step_NNNNNN` of a stage's folder, such as base_checkpoints/d20. It holds
the parameters, each rank's optimizer state, the tokenizer, and meta.json, which describes the model
and the run and has a hash of every file.

Read the modules in this order:
  files      the step folders: names, meta.json, hashes; writing, verifying, pruning them
  locate     which folder a stage and a tag mean; what meta.json says about a run
  families   from the model that meta.json names to its classes
  tensors    safetensors files, written tensor by tensor
  parts/     what each rank writes and reads of the parameters and the optimizer state
  save       writes a step, so that all ranks succeed or all fail
  load       builds a model that is ready to use
  same_run   refuses to resume with other settings, data or code
  resume     decides which step a stage resumes from, and restores it
Then the formats of others:
  huggingface/   published models, their tokenizers and chat templates, and peft's adapters
  upstream       conversion of karpathy/nanochat's checkpoints (`python -m` this package)
"""
