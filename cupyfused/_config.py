def show_config(): pass
