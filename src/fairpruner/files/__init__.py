"""Everything on disk: scores, plans, folders of pruned models, and the files of Hugging Face."""
