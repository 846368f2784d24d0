if __name__ == "__main__":
    try:
        from runner.launch import signals
        from runner.telemetry.sinks.console import open_streams

        open_streams()
        signals.listen()
        with signals.deferred():
            from runner.cli.main import start

        code = start()
    except KeyboardInterrupt:  # nothing has begun yet
        code = 130
    # Python ends by SIGINT, whatever the exit code, if an interrupt met code that was executed from
    # a string, as dataclasses are made. Executing another string clears that.
    exec("")
    raise SystemExit(code)
