"""Names of Lightning, Accelerate and transformers, for errors and docs/coming-from/names.md."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

Where = Literal["module", "argument", "attribute", "call", "hook", "function"]


class Row(NamedTuple):
    """A name, what it belonged to, the rest of a sentence about it, and whether it works here."""

    name: str
    where: Where
    use: str
    works: bool


def rows() -> Iterator[Row]:
    """Each name by itself; "{}" of a sentence is what stands behind a name."""
    for line in re.split(r"\n(?! )", _NAMES.strip()):
        where, use, names = re.sub(r"\s+", " ", line).split(" | ")
        for name, other in (each.partition("=")[::2] for each in names.split()):
            yield Row(name, cast(Where, where), use.format(other), use.startswith("as it was"))


_NAMES = """
module | as it was | save_hyperparameters hparams toggle_optimizer untoggle_optimizer
  example_input_array
module | use self.log; for images and text, a Logger of your own | logger loggers
module | use {} | load_from_checkpoint=load_module('runs/RUN/best') to_onnx=export
  to_torchscript=export freeze=requires_grad_(False) unfreeze=requires_grad_(True)
  backward=self.manual_backward clip_gradients=self.optimizers().clip_gradients
  is_main_process=self.is_global_zero process_index=self.global_rank num_processes=self.world_size
  gather=self.all_gather gather_for_metrics=self.log accumulate=accumulate_grad_batches
  autocast=precision clip_grad_norm_=gradient_clip_val main_process_first=prepare_data
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
  cpu=accelerator='cpu' reload_dataloaders_every_n_epochs=IterableDataset
  learning_rate=configure_optimizers weight_decay=configure_optimizers optim=configure_optimizers
  lr_scheduler_type=configure_optimizers warmup_steps=configure_optimizers
  optimizers=configure_optimizers data_collator=collate_fn load_best_model_at_end=BestCheckpoint
  metric_for_best_model=BestCheckpoint enable_model_summary=print(module) compute_metrics=self.log
  compute_loss_func=training_step per_device_train_batch_size=DataLoader
  per_device_eval_batch_size=DataLoader
argument | leave it out: a fit ends at max_epochs or max_steps | min_epochs min_steps
argument | leave it out: a fit always saves | enable_checkpointing checkpoint_callback
argument | call torchao's convert_to_float8_training in __init__ of the module | float8
argument | parts in activation_checkpointing are recomputed whole | activation_checkpointing_mode
argument | leave it out: evaluation has no gradients | inference_mode
argument | use fit(module, loader) | model args train_dataset eval_dataset
attribute | as it was | callback_metrics estimated_stepping_batches datamodule should_stop
attribute | use {} | logged_metrics=metrics progress_bar_metrics=metrics
  lr_scheduler_configs=schedulers lr_schedulers=schedulers log_dir=run_directory
  checkpoint_callback=run_directory ckpt_path=run_directory early_stopping_callback=callbacks
  train=fit evaluate=validate add_callback=callbacks fit_loop=current_epoch train_loop=current_epoch
  save_model=save_pretrained push_to_hub=save_pretrained save_checkpoint=checkpoint_every_n_steps
  tune=find_batch_size
attribute | use {} of the module | training=training validating=training testing=training
  num_devices=world_size device_ids=device gpus=device train_dataloader=trainer.datamodule
  val_dataloaders=trainer.datamodule
attribute | use log of the module, or a Logger of your own | logger experiment
call | as it was | model train_dataloaders val_dataloaders dataloaders datamodule
call | as it was, but for fit: use Trainer(resume='runs/RUN') | ckpt_path
call | as it was if True; to show a value nowhere, do not log it | logger
call | leave it out | return_predictions weights_only verbose rank_zero_only
hook | use {} | on_train_start=on_fit_start on_train_end=on_fit_end setup=on_fit_start
  teardown=on_fit_end on_after_backward=on_before_optimizer_step on_keyboard_interrupt=on_exception
  training_epoch_end=on_train_epoch_end validation_epoch_end=on_validation_epoch_end
  test_epoch_end=on_test_epoch_end configure_gradient_clipping=gradient_clip_val
  configure_callbacks=callbacks configure_model=meta_device configure_sharded_model=meta_device
  on_save_checkpoint=state_dict on_load_checkpoint=load_state_dict
hook | use manual optimization | backward optimizer_step optimizer_zero_grad lr_scheduler_step
hook | give the batch a method to(device) | transfer_batch_to_device
function | use {} | TrainerCallback=Callback EarlyStoppingCallback=EarlyStopping
  TrainingArguments=Trainer Accelerator=Trainer set_seed=Trainer(seed=1)
  ModelCheckpoint=BestCheckpoint DeviceStatsMonitor=SystemMonitor Timer=Trainer(max_time=…)
  EMAWeightAveraging=EMA Fabric=TrainingModule
function | upload in the job, or by a callback: docs/how-to/upload-checkpoints.md |
  UploadCheckpoints
function | use torch's functions, or for long sequences 'fsdp' | sequence
function | leave it out | LearningRateMonitor TQDMProgressBar RichProgressBar
"""
