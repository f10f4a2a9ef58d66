"""The numbers of a run in wandb, trackio and mlflow."""
