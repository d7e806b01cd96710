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
        for known, other in (word.partition("=")[::2] for word in names.split()):
            for name in known.split(","):
                yield Row(name, where, use.format(other.replace("&", " ")))


_NAMES = """
module | as it was | save_hyperparameters toggle_optimizer untoggle_optimizer example_input_array
  hparams
module | use self.log; for images and text, self.logger.experiment in a fit | logger loggers
module | use {} | to_onnx,to_torchscript=export unfreeze=requires_grad_(True) gather=self.all_gather
  is_main_process=self.is_global_zero gather_for_metrics=self.log accumulate=accumulate_grad_batches
  clip_gradients=self.optimizers().clip_gradients autocast=precision main_process_first=prepare_data
  backward=self.manual_backward process_index=self.global_rank clip_grad_norm_=gradient_clip_val
  freeze=requires_grad_(False) num_processes=self.world_size dtype=next(self.parameters()).dtype
module | it is the module's; a data module has data_index and data_replicas | trainer
module | create the module, and use cli.load_weights(module, 'runs/RUN/best') | load_from_checkpoint
module | leave it out: the trainer does it | prepare unwrap_model no_sync wait_for_everyone
argument | use configure_optimizers | weight_decay optim lr_scheduler_type warmup_steps warmup_ratio
  learning_rate optimizers adam_beta1 adam_beta2 adam_epsilon
argument | use DataLoader | per_device_train_batch_size dataloader_num_workers dataloader_drop_last
  per_device_eval_batch_size
argument | use {} | num_processes=devices progress_bar_refresh_rate,disable_tqdm=enable_progress_bar
  distributed_backend,fsdp=strategy log_with,report_to=loggers output_dir=default_root_dir
  auto_scale_batch_size,auto_find_batch_size=find_batch_size save_strategy=checkpoint_every_n_epochs
  terminate_on_nan=nonfinite_loss profiler=callbacks=['Profile'] save_steps=checkpoint_every_n_steps
  track_grad_norm=log_gradient_norm full_determinism=deterministic save_total_limit=keep_checkpoints
  auto_lr_find=find_learning_rate max_grad_norm=gradient_clip_val enable_model_summary=print(module)
  benchmark=cudnn_benchmark val_check_interval,eval_steps=val_every_n_steps compute_metrics=self.log
  num_train_epochs=max_epochs torch_compile=compile gradient_checkpointing=activation_checkpointing
  logging_steps=log_every_n_steps bf16=precision='bf16-mixed' cpu,use_cpu,no_cuda=accelerator='cpu'
  mixed_precision=precision push_to_hub=save_pretrained ddp_find_unused_parameters=strategy_options
  eval_strategy,evaluation_strategy=check_val_every_n_epoch compute_loss_func=training_step
  gradient_accumulation_steps=accumulate_grad_batches overwrite_output_dir=overwrite
  fp16=precision='16-mixed' data_collator,tokenizer,processing_class=collate_fn
  load_best_model_at_end,metric_for_best_model,greater_is_better=BestCheckpoint
  reload_dataloaders_every_n_epochs=IterableDataset
argument | leave it out: a fit ends at max_epochs or max_steps | min_epochs min_steps
argument | leave it out: a fit always saves | enable_checkpointing checkpoint_callback
argument | call torchao's convert_to_float8_training in __init__ of the module | float8
argument | parts in activation_checkpointing are recomputed whole | activation_checkpointing_mode
argument | leave it out: evaluation has no gradients | inference_mode
argument | use fit(module, loader) | model args train_dataset eval_dataset
attribute | in a fit as it was: trainer of a module or callback has it | callback_metrics
  estimated_stepping_batches datamodule should_stop num_training_batches
attribute | use {} | early_stopping_callback,add_callback=callbacks
  log_dir,ckpt_path=run_directory train=fit evaluate=validate save_model,push_to_hub=save_pretrained
  logged_metrics,progress_bar_metrics=metrics fit_loop,train_loop=current_epoch tune=find_batch_size
  lr_scheduler_configs,lr_schedulers=schedulers checkpoint_callback=run_directory/'best'
  save_checkpoint=checkpoint_every_n_steps
attribute | use {} of the module | training,validating,testing=training num_devices=world_size
  device_ids,gpus=device
attribute | keep the loaders that you give to fit | train_dataloader val_dataloaders
attribute | use log of the module; for images and text, its logger.experiment in a fit | logger
  experiment
subclass | use {} of a TrainingModule | compute_loss,training_step=training_step log=log
  get_train_dataloader=train_dataloader get_eval_dataloader=val_dataloader
  create_optimizer,create_scheduler,create_optimizer_and_scheduler=configure_optimizers
  evaluate,evaluation_loop,prediction_step=validation_step get_test_dataloader=test_dataloader
call | as it was | model train_dataloaders val_dataloaders dataloaders datamodule
call | as it was, but for fit: use Trainer(resume='runs/RUN') | ckpt_path
call | as it was if True; to show a value nowhere, do not log it | logger
call | leave it out | return_predictions weights_only enable_graph metric_attribute sync_dist_group
  verbose rank_zero_only
callbacks | use {} | every_n_epochs=Trainer(checkpoint_every_n_epochs=…) swa_epoch_start=start_epoch
  early_stopping_patience=patience stopping_threshold,divergence_threshold=self.trainer.stop(reason)
  save_top_k=k swa_lrs=torch's&SWALR&in&configure_optimizers
  every_n_train_steps,train_time_interval=Trainer(checkpoint_every_n_steps=…)
  early_stopping_threshold=min_delta update_every_n_steps=every_n_steps
callbacks | leave it out: the newest checkpoint is kept, whole, in the run directory | save_last
  dirpath filename save_weights_only save_on_exception auto_insert_metric_name
callbacks | leave it out: a value that is not finite is no improvement | check_finite
callbacks | leave it out: it acts after each validation | check_on_train_epoch_end
  save_on_train_epoch_end
scheduler | multiply the scheduler's own lengths by it, such as step_size | frequency
scheduler | leave it out: rates are logged as lr | name
scheduler | leave it out: monitor says it | reduce_on_plateau strict opt_idx
strategy | use 'ddp' with strategy_options={{'find_unused_parameters': …}} |
  ddp_find_unused_parameters_true ddp_find_unused_parameters_false
hook | use {} | on_train_end,teardown=on_fit_end configure_model,configure_sharded_model=meta_device
  on_validation_batch_end,on_validation_batch_start=validation_step test_epoch_end=on_test_epoch_end
  on_train_start,setup=on_fit_start on_keyboard_interrupt=on_exception configure_callbacks=callbacks
  validation_epoch_end=on_validation_epoch_end configure_gradient_clipping=gradient_clip_val
  on_after_backward=on_before_optimizer_step training_epoch_end=on_train_epoch_end
  on_save_checkpoint=state_dict on_load_checkpoint=load_state_dict
  state_dict,load_state_dict=rank_state,&load_rank_state&of&the&module
hook | use manual optimization | backward optimizer_step optimizer_zero_grad lr_scheduler_step
hook | give the batch a method to(device) | transfer_batch_to_device
function | use {} | TrainerCallback=Callback set_seed=Trainer(seed=1) ModelCheckpoint=BestCheckpoint
  TrainingArguments,Accelerator,Seq2SeqTrainer,SFTTrainer=Trainer LightningCLI=python&-m&PACKAGE&fit
  DeviceStatsMonitor=SystemMonitor Timer=Trainer(max_time=…) Fabric,LightningModule=TrainingModule
  EarlyStoppingCallback=EarlyStopping EMAWeightAveraging=EMA LightningDataModule=DataModule
function | upload in the job or a callback: docs/how-to/upload-checkpoints.md | UploadCheckpoints
function | use torch's functions, or for long sequences 'fsdp' | sequence
function | use {} | rank_zero_only=self.is_global_zero Tuner=Trainer.find_batch_size
  DDPStrategy,FSDPStrategy=Trainer(strategy=…)
  TensorBoardLogger,WandbLogger,MLFlowLogger,CSVLogger=Trainer(loggers=[…])
function | leave it out | LearningRateMonitor TQDMProgressBar RichProgressBar ModelSummary
"""
