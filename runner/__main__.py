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
    # Python ends by SIGINT, whatever the exit code, if an interrupt met the code of a string last,
    # such as that of a dataclass. Further such code makes it forget that.
    exec("")
    raise SystemExit(code)
