from django.db import migrations, models


class Migration(migrations.Migration):
    """Used bytes by device; what was there is a few seconds old and comes again with the next heartbeat."""

    dependencies = [
        ('catalog', '0012_others_on_a_device'),
    ]

    operations = [
        migrations.RemoveField(
            model_name='machine',
            name='used_bytes',
        ),
        migrations.AddField(
            model_name='machine',
            name='used_bytes',
            field=models.JSONField(default=list),
        ),
    ]
