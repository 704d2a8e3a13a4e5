"""Everything on disk that is a model: folders of pruned models, and the files of Hugging Face."""

# the files of a pruned model's folder
PLAN, MODEL, REPORT = "plan.json", "model.safetensors", "report.json"
