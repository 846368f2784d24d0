if __name__ == "__main__":
    try:
        from runner.launch import signals
        from runner.telemetry.sinks.console import open_streams

        open_streams()
        signals.listen()
        from runner.cli.main import start
    except KeyboardInterrupt:  # nothing has begun yet
        raise SystemExit(130) from None
    raise SystemExit(start())
