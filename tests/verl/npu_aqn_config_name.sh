python3 -m verl.trainer.main_ppo --config-name=your_config
