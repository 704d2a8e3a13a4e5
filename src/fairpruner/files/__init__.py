"""Models on disk: folders of pruned models, and the files of Hugging Face models."""

# the files of a pruned model's folder
PLAN, MODEL, REPORT = "plan.json", "model.safetensors", "report.json"
