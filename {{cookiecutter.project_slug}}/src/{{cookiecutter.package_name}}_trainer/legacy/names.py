"""Names of Lightning, Accelerate and transformers, for errors and docs/coming-from/names.md."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """A name, what it belonged to, and the rest of a sentence about it."""

    name: str
    where: str
    use: str


def rows() -> Iterator[Row]:
    """Each name by itself; "{}" of a sentence is what stands behind a name, "&" a space."""
    for line in re.split(r"\n(?! )", _NAMES.strip()):
        where, use, names = re.sub(r"\s+", " ", line).split(" | ")
        for name, other in (each.partition("=")[::2] for each in names.split()):
            yield Row(name, where, use.format(other.replace("&", " ")))


_NAMES = """
module | as it was | save_hyperparameters hparams toggle_optimizer untoggle_optimizer
  example_input_array
module | use self.log; for images and text, a Logger of your own | logger loggers
module | use {} | to_onnx=export to_torchscript=export freeze=requires_grad_(False)
  unfreeze=requires_grad_(True) backward=self.manual_backward
  clip_gradients=self.optimizers().clip_gradients is_main_process=self.is_global_zero
  process_index=self.global_rank num_processes=self.world_size gather=self.all_gather
  gather_for_metrics=self.log accumulate=accumulate_grad_batches autocast=precision
  clip_grad_norm_=gradient_clip_val main_process_first=prepare_data
module | create the module, and use load_weights(module, 'runs/RUN/best') | load_from_checkpoint
module | leave it out: the trainer does it | prepare unwrap_model no_sync wait_for_everyone
argument | use {} | benchmark=cudnn_benchmark num_processes=devices distributed_backend=strategy
  progress_bar_refresh_rate=enable_progress_bar terminate_on_nan=nonfinite_loss
  val_check_interval=val_every_n_steps profiler=callbacks=['Profile']
  track_grad_norm=log_gradient_norm auto_lr_find=find_learning_rate
  auto_scale_batch_size=find_batch_size mixed_precision=precision
  gradient_accumulation_steps=accumulate_grad_batches log_with=loggers report_to=loggers
  output_dir=default_root_dir num_train_epochs=max_epochs max_grad_norm=gradient_clip_val
  torch_compile=compile full_determinism=deterministic
  gradient_checkpointing=activation_checkpointing eval_steps=val_every_n_steps fsdp=strategy
  eval_strategy=check_val_every_n_epoch save_strategy=checkpoint_every_n_epochs
  save_steps=checkpoint_every_n_steps save_total_limit=keep_checkpoints
  logging_steps=log_every_n_steps bf16=precision='bf16-mixed' fp16=precision='16-mixed'
  cpu=accelerator='cpu' reload_dataloaders_every_n_epochs=IterableDataset data_collator=collate_fn
  load_best_model_at_end=BestCheckpoint metric_for_best_model=BestCheckpoint
  enable_model_summary=print(module) compute_metrics=self.log compute_loss_func=training_step
  per_device_train_batch_size=DataLoader per_device_eval_batch_size=DataLoader
argument | use configure_optimizers | learning_rate weight_decay optim lr_scheduler_type
  warmup_steps optimizers
argument | leave it out: a fit ends at max_epochs or max_steps | min_epochs min_steps
argument | leave it out: a fit always saves | enable_checkpointing checkpoint_callback
argument | call torchao's convert_to_float8_training in __init__ of the module | float8
argument | parts in activation_checkpointing are recomputed whole | activation_checkpointing_mode
argument | leave it out: evaluation has no gradients | inference_mode
argument | use fit(module, loader) | model args train_dataset eval_dataset
attribute | as it was | callback_metrics estimated_stepping_batches datamodule should_stop
attribute | use {} | logged_metrics=metrics progress_bar_metrics=metrics
  lr_scheduler_configs=schedulers lr_schedulers=schedulers log_dir=run_directory
  checkpoint_callback=run_directory/'best' ckpt_path=run_directory early_stopping_callback=callbacks
  num_training_batches=total_steps train=fit evaluate=validate add_callback=callbacks
  fit_loop=current_epoch train_loop=current_epoch save_model=save_pretrained
  push_to_hub=save_pretrained save_checkpoint=checkpoint_every_n_steps tune=find_batch_size
attribute | use {} of the module | training=training validating=training testing=training
  num_devices=world_size device_ids=device gpus=device train_dataloader=trainer.datamodule
  val_dataloaders=trainer.datamodule
attribute | use log of the module, or a Logger of your own | logger experiment
call | as it was | model train_dataloaders val_dataloaders dataloaders datamodule
call | as it was, but for fit: use Trainer(resume='runs/RUN') | ckpt_path
call | as it was if True; to show a value nowhere, do not log it | logger
call | leave it out | return_predictions weights_only verbose rank_zero_only enable_graph
  metric_attribute sync_dist_group
callbacks | use {} | save_top_k=k every_n_train_steps=Trainer(checkpoint_every_n_steps=…)
  every_n_epochs=Trainer(checkpoint_every_n_epochs=…) check_finite=Trainer(nonfinite_loss=…)
  train_time_interval=Trainer(checkpoint_every_n_steps=…) early_stopping_patience=patience
  early_stopping_threshold=min_delta update_every_n_steps=every_n_steps swa_epoch_start=start_epoch
  stopping_threshold=self.trainer.stop(reason) divergence_threshold=self.trainer.stop(reason)
  swa_lrs=torch's&SWALR&in&configure_optimizers
callbacks | leave it out: the newest checkpoint is kept, whole, in the run directory | dirpath
  filename save_last save_weights_only save_on_exception auto_insert_metric_name
callbacks | leave it out: it acts after each validation | check_on_train_epoch_end
  save_on_train_epoch_end
scheduler | multiply the scheduler's own lengths by it, such as step_size | frequency
scheduler | leave it out: rates are logged as lr | name opt_idx reduce_on_plateau
strategy | use 'ddp' with strategy_options={{'find_unused_parameters': …}} |
  ddp_find_unused_parameters_true ddp_find_unused_parameters_false
hook | use {} | on_train_start=on_fit_start on_train_end=on_fit_end setup=on_fit_start
  teardown=on_fit_end on_after_backward=on_before_optimizer_step on_keyboard_interrupt=on_exception
  on_validation_batch_end=validation_step on_validation_batch_start=validation_step
  training_epoch_end=on_train_epoch_end validation_epoch_end=on_validation_epoch_end
  test_epoch_end=on_test_epoch_end configure_gradient_clipping=gradient_clip_val
  configure_callbacks=callbacks configure_model=meta_device configure_sharded_model=meta_device
  on_save_checkpoint=state_dict on_load_checkpoint=load_state_dict
hook | use manual optimization | backward optimizer_step optimizer_zero_grad lr_scheduler_step
hook | give the batch a method to(device) | transfer_batch_to_device
function | use {} | TrainerCallback=Callback EarlyStoppingCallback=EarlyStopping
  TrainingArguments=Trainer Accelerator=Trainer set_seed=Trainer(seed=1)
  ModelCheckpoint=BestCheckpoint DeviceStatsMonitor=SystemMonitor Timer=Trainer(max_time=…)
  EMAWeightAveraging=EMA Fabric=TrainingModule LightningModule=TrainingModule
  LightningDataModule=DataModule LightningCLI=python&-m&PACKAGE&fit
function | upload in the job, or by a callback: docs/how-to/upload-checkpoints.md |
  UploadCheckpoints
function | use torch's functions, or for long sequences 'fsdp' | sequence
function | leave it out | LearningRateMonitor TQDMProgressBar RichProgressBar
"""
