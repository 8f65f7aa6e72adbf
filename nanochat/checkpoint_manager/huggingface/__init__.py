"""Folders in the layout of Hugging Face: published models, their tokenizers, and peft's adapters.

Read the modules in this order:
  config     config.json: which family a model is of, and its shape
  weights    safetensors files, read parameter by parameter
  tokenizer  tokenizer.json, behind the members that our own tokenizer has
  template   chat templates, rendered in a child process (template_child)
  adapter    adapter_config.json and adapter_model.safetensors
  base       a published model as the start of fine-tuning
"""
