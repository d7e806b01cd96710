"""Lightning's names of a trainer that have no answer here: what to use instead."""

INSTEAD = {
    **dict.fromkeys(("logged_metrics", "progress_bar_metrics"), "metrics"),
    **dict.fromkeys(("lr_scheduler_configs", "lr_schedulers"), "schedulers"),
    **dict.fromkeys(("log_dir", "checkpoint_callback", "ckpt_path"), "run_directory"),
    **dict.fromkeys(("training", "validating", "testing", "state"), "training of the module"),
    **dict.fromkeys(("fit_loop", "train_loop"), "current_epoch and global_step"),
    **dict.fromkeys(("train_dataloader", "val_dataloaders"), "attributes of the data module"),
    **dict.fromkeys(("num_devices", "device_ids", "gpus"), "world_size, and device of the module"),
    **dict.fromkeys(("model", "lightning_module"), "the module itself"),
    **dict.fromkeys(("logger", "experiment"), "log of the module, or a Logger of your own"),
}
